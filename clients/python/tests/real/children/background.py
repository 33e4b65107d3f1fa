"""An application that does not wait for a compile."""

from __future__ import annotations

import warnings
from typing import Any

import epcache
import inference


def run(model: dict[str, Any], path: str, ep: Any, meanwhile: str) -> dict[str, Any]:
    """Makes a session at once, and another one after the compile; returns the report and output of
    each.
    """
    warnings.simplefilter("error")
    options = epcache.SessionOptions()
    for name, value in model["dimensions"].items():
        options.add_free_dimension_override_by_name(name, value)

    def session() -> tuple[epcache.InferenceSession, dict[str, Any]]:
        made = epcache.InferenceSession(
            path, options, ep=tuple(ep), on_miss="background", meanwhile=meanwhile
        )
        report = made.epcache
        outputs = inference.outputs(made, model)
        return made, {
            "outcome": report.outcome,
            "job": report.job,
            "providers": made.get_providers(),
            "values": [array.tolist() for array in outputs],
        }

    plain, first = session()
    there = plain.epcache.wait(120)
    _, second = session()
    return {"first": first, "there": there, "second": second}
