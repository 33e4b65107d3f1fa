"""Reports whether an unmodified runtime loads an artefact."""

from __future__ import annotations

import inference
import loading


def run(path: str, ep: str, options: dict[str, str], session_options: dict[str, str]) -> str:
    """Returns why not, "" if it does."""
    try:
        loading.load(path, ep, inference.device(ep), options, session_options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
