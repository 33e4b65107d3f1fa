"""A program without epcached that loads a compiled graph with plain ONNX Runtime."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import inference
import onnxruntime as ort


def run(model: dict[str, Any], graph: str, ep: str, options: dict[str, str]) -> dict[str, Any]:
    """Returns the outputs, and the execution providers that ran the nodes."""
    with tempfile.TemporaryDirectory(prefix="epcached-profile-") as directory:
        settings = inference.session_options(ep, options, model["dimensions"])
        settings.enable_profiling = True
        settings.profile_file_prefix = str(Path(directory) / "profile")
        session = ort.InferenceSession(graph, settings, enable_fallback=0)
        arrays = inference.outputs(session, model)
        return {
            "outputs": inference.exact(arrays),
            "executed by": inference.executed_by(session.end_profiling()),
        }
