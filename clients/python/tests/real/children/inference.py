"""Shared by the children: a plain session on a plugin execution provider, inputs and outputs."""

from __future__ import annotations

import importlib
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import inputs
import numpy as np
import onnxruntime as ort

PACKAGES = {
    "OpenVINOExecutionProvider": "onnxruntime_ep_openvino",
    "QNNExecutionProvider": "onnxruntime_qnn",
}

LEVELS = {
    "disable_all": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def device(ep: str) -> Any:
    """Registers the provider's library and returns its CPU device, as in ONNX Runtime's
    documentation.
    """
    if not any(found.ep_name == ep for found in ort.get_ep_devices()):
        ort.register_execution_provider_library(
            ep, importlib.import_module(PACKAGES[ep]).get_library_path()
        )
    return next(
        d
        for d in ort.get_ep_devices()
        if d.ep_name == ep and d.device.type == ort.OrtHardwareDeviceType.CPU
    )


def provider_options(ep: str, options: dict[str, str]) -> dict[str, str]:
    """Returns the provider options. QNN's backend is the one beside its library, because its name
    alone is not found.
    """
    if ep != "QNNExecutionProvider":
        return options
    library = importlib.import_module(PACKAGES[ep]).get_library_path()
    return {**options, "backend_path": str(Path(library).parent / "libQnnHtp.so")}


def session_options(
    ep: str, options: dict[str, str], dimensions: dict[str, int]
) -> ort.SessionOptions:
    result = ort.SessionOptions()
    result.add_provider_for_devices([device(ep)], provider_options(ep, options))
    for name, value in dimensions.items():
        result.add_free_dimension_override_by_name(name, value)
    return result


def outputs(session: ort.InferenceSession, model: dict[str, Any]) -> list[np.ndarray]:
    return session.run(model.get("outputs"), inputs.make(model))


def exact(arrays: list[np.ndarray]) -> list[dict[str, Any]]:
    """Returns the arrays in a JSON form that is equal only if every bit is equal. Marks an output
    without a finite number other than 0, because its equality proves nothing.
    """
    return [
        {
            "dtype": str(a.dtype),
            "shape": list(a.shape),
            "bytes": sha256(a.tobytes()).hexdigest(),
            "blank": blank(a),
        }
        for a in arrays
    ]


def blank(array: np.ndarray) -> bool:
    if array.dtype.kind not in "fiub":
        return array.size == 0
    return not (np.isfinite(array) & (array != 0)).any()


def executed_by(profile: str) -> list[str]:
    """Returns the execution providers that ran the nodes, sorted, from ONNX Runtime's profile."""
    events = json.loads(Path(profile).read_text())
    Path(profile).unlink()
    return sorted(
        {
            e["args"]["provider"]
            for e in events
            if e.get("cat") == "Node" and "provider" in e.get("args", {})
        }
    )
