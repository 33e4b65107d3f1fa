"""An application that names no execution provider, but sets ONNX Runtime's device policy or a
delegate.
"""

from __future__ import annotations

import warnings
from typing import Any

import epcache
import inference
import onnxruntime as ort


def run(model: dict[str, Any], path: str, ep: str) -> dict[str, Any]:
    """Returns the result of each policy, of a delegate, and of a policy before a library was
    registered.
    """
    result = {
        "nothing registered": session(path, model, ort.OrtExecutionProviderDevicePolicy.PREFER_NPU)
    }
    inference.device(ep)  # registers its library, as such an application does
    for name, policy in ort.OrtExecutionProviderDevicePolicy.__members__.items():
        plain = ort.SessionOptions()
        plain.set_provider_selection_policy(policy)
        expected = ort.InferenceSession(path, plain, enable_fallback=0)
        result[name] = session(path, model, policy)
        result[name]["plain"] = {
            "providers": expected.get_providers(),
            "outputs": inference.exact(inference.outputs(expected, model)),
        }
    result["delegate"] = session(
        path, model, lambda devices, *_: [d for d in devices if d.ep_name == ep][:1]
    )
    return result


def session(path: str, model: dict[str, Any], choice: Any) -> dict[str, Any]:
    options = epcache.SessionOptions()
    if callable(choice):
        options.set_provider_selection_policy_delegate(choice)
    else:
        options.set_provider_selection_policy(choice)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = epcache.InferenceSession(path, options)
    return {
        "outcome": made.epcache.outcome,
        "why": made.epcache.why,
        "providers": made.get_providers(),
        "outputs": inference.exact(inference.outputs(made, model)),
        "warnings": [str(warning.message) for warning in caught],
    }
