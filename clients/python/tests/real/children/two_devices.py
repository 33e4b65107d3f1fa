"""An application that chooses one of two devices of equal type, vendor and id."""

from __future__ import annotations

import warnings
from typing import Any

import epcache
import inference
import onnxruntime as ort


def run(
    model: dict[str, Any], path: str, ep: str, library: str, wishes: dict[str, Any]
) -> list[dict[str, Any]]:
    """Returns the outcome of a session for each device, in the order of ONNX Runtime's list, and
    the hardware architecture for which its build was compiled.
    """
    ort.register_execution_provider_library(ep, library)
    result = []
    for device in [one for one in ort.get_ep_devices() if one.ep_name == ep]:
        options = epcache.SessionOptions()
        options.add_provider_for_devices([device], {})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = epcache.InferenceSession(path, options, **wishes)
        result.append(
            {
                "outcome": made.epcache.outcome,
                "build": made.epcache.build,
                "why": made.epcache.why,
                "asked": device.ep_metadata["hardware_architecture"],
                "outputs": inference.exact(inference.outputs(made, model)),
                "warnings": [str(one.message) for one in caught],
            }
        )
    return result
