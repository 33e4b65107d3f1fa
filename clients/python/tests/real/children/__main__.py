"""Does one piece of work: reads its name, arguments and import paths from standard input, as child.py wrote them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    request = json.load(sys.stdin)
    sys.path[:0] = request["paths"]
    result = importlib.import_module(request["work"]).run(**request["arguments"])
    Path(request["answer"]).write_text(json.dumps(result))
