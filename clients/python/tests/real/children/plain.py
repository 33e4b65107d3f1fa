"""An application without epcached: it compiles the model itself, and loads its own artefact."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import inference
import onnxruntime as ort


def run(
    model: dict[str, Any], path: str, ep: str, options: dict[str, str], level: str
) -> dict[str, Any]:
    """Returns the files and the outputs for "sidecar" and "embedded"."""
    result = {}
    for form in ("sidecar", "embedded"):
        with tempfile.TemporaryDirectory(prefix="epcached-plain-") as directory:
            graph = str(Path(directory) / "model_ctx.onnx")
            settings = inference.session_options(ep, options, model["dimensions"])
            more = {"graph_optimization_level": inference.LEVELS[level]} if level else {}
            compiler = ort.ModelCompiler(
                settings, path, embed_compiled_data_into_model=form == "embedded", **more
            )
            compiler.compile_to_file(graph)
            settings = inference.session_options(ep, options, model["dimensions"])
            # Otherwise a refused artefact would run on the CPU execution provider.
            session = ort.InferenceSession(graph, settings, enable_fallback=0)
            result[form] = {
                "files": len(list(Path(directory).iterdir())),
                "providers": session.get_providers(),
                "outputs": inference.exact(inference.outputs(session, model)),
            }
    return result
