"""Does one piece of work: reads its name, arguments and import paths from standard input, as child.py wrote them."""

from __future__ import annotations

import importlib
import json
import sys

if __name__ == "__main__":
    request = json.load(sys.stdin)
    sys.path[:0] = request["paths"]
    # Opened now: the work may give up the rights that this takes.
    with open(request["answer"], "w") as answer:
        json.dump(importlib.import_module(request["work"]).run(**request["arguments"]), answer)
