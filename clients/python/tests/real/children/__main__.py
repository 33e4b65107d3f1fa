"""Does one piece of work: reads its name, arguments and import paths from standard input, as
child.py wrote them.
"""

from __future__ import annotations

import importlib
import json
import sys

if __name__ == "__main__":
    request = json.load(sys.stdin)
    sys.path[:0] = request["paths"]
    # Opened now, because the function may drop the privileges for it.
    with open(request["answer"], "w") as answer:
        work = importlib.import_module(request["work"])
        if request["hello"] is not None and "epcache" in sys.modules:
            sys.modules["epcache"].Client.__init__.__kwdefaults__["hello_limit"] = request["hello"]
        json.dump(work.run(**request["arguments"]), answer)
