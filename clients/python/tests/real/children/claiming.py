"""An application that compiles under a claim, with its own libraries."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from typing import Any

import epcache
import inference
import inputs


def run(
    model: dict[str, Any],
    path: str,
    ep: Any,
    times: int = 1,
    user: int = 0,
    in_memory: bool = False,
    on_miss: str = "claim",
    hidden: str = "",
) -> dict[str, Any]:
    """Makes `times` sessions in sequence; returns the report and output of each, and the warnings.
    The module `hidden` cannot be imported.
    """
    if hidden:
        sys.modules[hidden] = None  # type: ignore[assignment]
    if user:
        # Imported now, because the other user may not read their directory.
        warm = (
            epcache.InferenceSession,
            epcache.SessionOptions,
            importlib.import_module("epcache._compile"),
            tempfile.gettempdir(),
            inputs.make(model),
        )
        assert all(warm)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    source: Any = path
    if in_memory:
        with open(path, "rb") as file:
            source = file.read()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = [one(model, source, ep, on_miss) for _ in range(times)]
    return {
        "sessions": made,
        "warnings": [
            str(w.message) for w in caught if issubclass(w.category, epcache.EpcacheWarning)
        ],
    }


def one(model: dict[str, Any], source: Any, ep: Any, on_miss: str) -> dict[str, Any]:
    options = epcache.SessionOptions()
    for name, value in model["dimensions"].items():
        options.add_free_dimension_override_by_name(name, value)
    phases: list[str] = []
    try:
        session = epcache.InferenceSession(
            source,
            options,
            ep=tuple(ep),
            on_miss=on_miss,
            progress=lambda p: phases.append(f"{p.phase} {p.detail}"),
        )
    except epcache.Error as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "facts": error.facts,
            "phases": phases,
        }
    report = session.epcache
    outputs = inference.outputs(session, model)
    return {
        "outcome": report.outcome,
        "why": report.why,
        "build": report.build,
        "providers": session.get_providers(),
        "outputs": inference.exact(outputs),
        "phases": phases,
    }
