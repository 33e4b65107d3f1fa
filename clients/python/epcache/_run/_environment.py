"""What `epcachectl run` was told, as it comes in the environment variable EPCACHE_RUN: a JSON
object.
"""

from __future__ import annotations

import functools
import os
from typing import Any

VARIABLE = "EPCACHE_RUN"


@functools.cache
def run_settings() -> dict[str, Any]:
    """Returns what was said when this process began. Raises ValueError for what cannot be
    understood.
    """
    import json

    value = json.loads(os.environ.get(VARIABLE) or "{}")
    if not isinstance(value, dict):
        raise ValueError(f"{VARIABLE} is not a JSON object")
    return value


def runtime() -> str:
    """Returns the directory of --runtime, "" where there is none. What cannot be understood has
    none: the first session finds out what is wrong.
    """
    if '"runtime"' not in os.environ.get(VARIABLE, ""):
        # without a look at the rest: this is asked in every program that imports onnxruntime
        return ""
    try:
        return str(run_settings().get("runtime", ""))
    except ValueError:
        return ""
