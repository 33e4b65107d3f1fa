"""Sessions of a model with and without epcached: their interface, and their outputs."""

from __future__ import annotations

from typing import Any

import epcache
import inference
import numpy as np
import onnxruntime as ort


def run(ep: str, options: dict[str, str], path: str, feeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Describes a plain session, one of the first request and one of the second. Each is run with
    each of `feeds`: nested lists, with the input's element type.
    """
    settings = inference.session_options(ep, options, {})
    described = {"plain": _describe(ort.InferenceSession(path, settings, enable_fallback=0), feeds)}
    for name in ("first", "second"):
        session = epcache.InferenceSession(
            path, epcache.SessionOptions(), ep=(f"{ep}:CPU", options), enable_fallback=0
        )
        described[name] = {
            "outcome": session.epcache.outcome,
            "why": session.epcache.why,
            "session": _describe(session, feeds),
        }
    return described


def _describe(session: Any, feeds: list[dict[str, Any]]) -> dict[str, Any]:
    about = session.get_modelmeta()
    values = {
        what: [(value.name, value.type, value.shape) for value in find()]
        for what, find in (
            ("inputs", session.get_inputs),
            ("outputs", session.get_outputs),
            ("overridable", session.get_overridable_initializers),
        )
    }
    metadata = {
        key: value
        for key, value in about.custom_metadata_map.items()
        if not key.startswith("ep_compatibility_info.")
    }
    texts = "description domain graph_description graph_name producer_name version".split()
    types = {"tensor(float)": np.float32, "tensor(bool)": np.bool_, "tensor(int64)": np.int64}
    known = {name: types[kind] for name, kind, _ in values["inputs"] + values["overridable"]}
    computed = [
        [
            output.tolist()
            for output in session.run(
                None, {name: np.array(value, known[name]) for name, value in feed.items()}
            )
        ]
        for feed in feeds
    ]
    return {
        **values,
        **{text: getattr(about, text) for text in texts},
        "metadata": metadata,
        "computed": computed,
    }
