"""An application with epcached: it loads an artefact by descriptor and by path, or makes a
session.
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
    level: str,
    socket: str,
    runtime: str,
) -> dict[str, Any]:
    """Returns for "sidecar" and "embedded" the outcomes of three requests, the files, and the
    outputs by loader.
    """
    result = {}
    with epcache.Client(socket) as client:
        for form in ("sidecar", "embedded"):
            wishes: dict[str, Any] = {
                "dims": model["dimensions"],
                "embed": form == "embedded",
                "runtime": runtime,
            }
            wishes["graph_optimization_level"] = level
            first = client.acquire(path, (f"{ep}:CPU", options), **wishes)
            first.close()
            with client.acquire(path, (f"{ep}:CPU", options), **wishes) as artefact:
                outputs = {
                    "by descriptor": load(artefact, artefact.path, model, ep),
                    "by path": load(artefact, artefact.view_path, model, ep),
                }
            session = epcache.InferenceSession(
                path,
                dimensions(model),
                ep=(f"{ep}:CPU", options),
                client=client,
                embed=form == "embedded",
            )
            outputs["as a session"] = inference.exact(inference.outputs(session, model))
            result[form] = {
                "outcomes": [first.outcome, artefact.outcome, session.epcache.outcome],
                "files": len(artefact.files),
                "outputs": outputs,
            }
    return result


def load(artefact: epcache.Artefact, path: str, model: dict[str, Any], ep: str) -> Any:
    """Loads with plain ONNX Runtime and exactly the options that came with the artefact."""
    settings = inference.session_options(ep, artefact.provider_options[ep], model["dimensions"])
    for key, value in artefact.session_options.items():
        settings.add_session_config_entry(key, value)
    if artefact.graph_optimization_level:
        settings.graph_optimization_level = inference.LEVELS[artefact.graph_optimization_level]
    return inference.exact(
        inference.outputs(ort.InferenceSession(path, settings, enable_fallback=0), model)
    )


def dimensions(model: dict[str, Any]) -> epcache.SessionOptions:
    result = epcache.SessionOptions()
    for name, value in model["dimensions"].items():
        result.add_free_dimension_override_by_name(name, value)
    return result
