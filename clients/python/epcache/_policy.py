"""Device policies: finds the execution provider and device that ONNX Runtime chooses."""

from __future__ import annotations

from typing import Any

from ._onnxruntime import ort

CPU = "CPUExecutionProvider"

# The smallest model that execution providers take: y = Relu(x), one float.
_MODEL = (
    b'\x08\x08:3\n\x0c\n\x01x\x12\x01y"\x04Relu\x12\x01g'
    b"Z\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01"
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x02\x10\x11"
)


class Undecided(Exception):
    """The policy's choice cannot be requested from the daemon. The text has the reason."""


def chosen(policy: Any) -> Any:
    """Returns the device that a policy chooses in this process, as ONNX Runtime's OrtEpDevice.

    A policy depends on the devices and not on the model, so a session of a tiny model shows it.
    Raises Undecided.
    """
    options = ort.SessionOptions()
    options.set_provider_selection_policy(policy)
    try:
        session = ort.InferenceSession(_MODEL, options, enable_fallback=0)
        names = [name for name in session.get_providers() if name != CPU]
        devices = [device for device in session.get_input_epdevices() if device is not None]
    except Exception as error:  # ONNX Runtime may raise anything
        raise Undecided(f"device policy {policy.name}: {error}") from error
    if len(names) > 1:
        raise Undecided(
            f"device policy {policy.name} chooses several execution providers: {', '.join(names)}"
        )
    if not names or not devices or devices[0].ep_name == CPU:
        raise Undecided(f"device policy {policy.name} chooses {CPU}, which does not compile models")
    return devices[0]
