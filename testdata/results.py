"""Results of child processes, on a descriptor to which vendors' libraries do not write."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any


def tell(measure: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    """Prints the result of measure as JSON, and nothing else, to standard output. Execution
    providers print to descriptor 1, even when the C library flushes buffers at exit. So descriptor
    1 becomes standard error, and the result has its own descriptor.
    """
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        json.dump(measure(*arguments), results)
