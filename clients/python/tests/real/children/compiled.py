"""An application that loads models with EPContext nodes: shipped artefacts, and wrappers of
OpenVINO's own format.
"""

from __future__ import annotations

from typing import Any

import epcache
import inference
import onnxruntime as ort


def run(
    model: dict[str, Any],
    path: str,
    ep: str,
    options: dict[str, str],
    asked: list[dict[str, Any]],
    source: str = "",
) -> dict[str, Any]:
    """Compiles `source` to `path` with plain ONNX Runtime. Makes a session of `path` for each of
    `asked`, and compares it with plain ONNX Runtime's.
    """
    if source:
        made = inference.session_options(ep, options, model["dimensions"])
        ort.ModelCompiler(made, source, embed_compiled_data_into_model=False).compile_to_file(path)
    plain = inference.exact(
        inference.outputs(
            ort.InferenceSession(path, inference.session_options(ep, options, {})), model
        )
    )
    sessions = [epcache.InferenceSession(path, ep=(f"{ep}:CPU", options), **more) for more in asked]
    return {
        "outcomes": [s.epcache.outcome for s in sessions],
        "warnings": [s.epcache.warnings for s in sessions],
        "right": [inference.exact(inference.outputs(s, model)) == plain for s in sessions],
    }
