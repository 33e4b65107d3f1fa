"""The sessions of an application with several models, each with its own options."""

from __future__ import annotations

import os
from typing import Any

import epcache


def run(ep: str, directory: str, asks: list[dict[str, Any]]) -> list[str]:
    """Returns the outcome of each session; several paths are a group."""
    outcomes = []
    for ask in asks:
        options = epcache.SessionOptions()
        for name, value in ask["dims"].items():
            options.add_free_dimension_override_by_name(name, value)
        wishes: dict[str, Any] = {"ep": (ep, ask["options"])}
        if isinstance(ask["path"], str):
            outcomes.append(
                epcache.InferenceSession(
                    os.path.join(directory, ask["path"]), options, **wishes
                ).epcache.outcome
            )
            continue
        with epcache.SessionGroup(
            [os.path.join(directory, path) for path in ask["path"]], options, **wishes
        ) as sessions:
            (outcome,) = {session.epcache.outcome for session in sessions}
        outcomes.append(outcome)
    return outcomes
