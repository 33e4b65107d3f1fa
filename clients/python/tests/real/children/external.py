"""Sessions of a model with external data, given by path or in memory, and their outputs."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import epcache
import numpy as np

DIRECTORY = "session.model_external_initializers_file_folder_path"


def run(ep: Any, path: str, width: int, asks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Makes a session for each of `asks`: `in_memory`, `directory` of the external data, `working`
    directory, `on_miss`, `plain`.
    """
    return [_one(tuple(ep), path, width, **ask) for ask in asks]


def _one(
    ep: Any,
    path: str,
    width: int,
    in_memory: bool = False,
    directory: str = "",
    working: str = "/",
    on_miss: str = "wait",
    plain: bool = False,
) -> dict[str, Any]:
    os.chdir(working)
    options = epcache.SessionOptions()
    if directory:
        options.add_session_config_entry(DIRECTORY, directory)
    phases: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            session = epcache.InferenceSession(
                Path(path).read_bytes() if in_memory else path,
                options,
                ep=ep,
                client=False if plain else None,
                on_miss=on_miss,
                progress=lambda step: phases.append(step.detail),
            )
        except Exception as error:
            return {"error": str(error)}
    values = session.run(None, {"x": np.ones((1, width), np.float32)})[0]
    return {
        "outcome": session.epcache.outcome,
        "why": session.epcache.why,
        "request_key": session.epcache.request_key,
        "values": np.asarray(values).ravel().tolist(),
        "in process": "in this process" in phases,
        "warnings": [
            str(w.message) for w in caught if issubclass(w.category, epcache.EpcacheWarning)
        ],
    }
