"""The options of `epcachectl run`: a JSON object in the environment variable EPCACHE_RUN."""

from __future__ import annotations

import functools
import os
from typing import Any

VARIABLE = "EPCACHE_RUN"


@functools.cache
def run_settings() -> dict[str, Any]:
    """Returns the options as they were at the first call. Raises ValueError if invalid."""
    import json

    value = json.loads(os.environ.get(VARIABLE) or "{}")
    if not isinstance(value, dict):
        raise ValueError(f"{VARIABLE} is not a JSON object")
    return value


def runtime() -> str:
    """Returns the directory of --runtime, "" without it or if the options are invalid, which the
    first session reports.
    """
    if '"runtime"' not in os.environ.get(VARIABLE, ""):
        # without parsing, because every program that imports onnxruntime calls this
        return ""
    try:
        return str(run_settings().get("runtime", ""))
    except ValueError:
        return ""
