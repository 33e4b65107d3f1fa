"""Drives the Python client through the conformance suite: a question a line on standard input, its
answer a line on standard output. See the README of the suite.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "python"))

import epcache  # noqa: E402

# The protocol's classes by this client's errors. Other errors are named by their type, which
# matches no row.
CLASSES = {
    epcache.NotFound: "NOT_FOUND",
    epcache.Stale: "STALE",
    epcache.CompileFailed: "COMPILE_FAILED",
    epcache.Busy: "BUSY",
    epcache.DeadlineExceeded: "DEADLINE",
    epcache.BadModel: "BAD_MODEL",
    epcache.BadRequest: "BAD_REQUEST",
    epcache.NotAllowed: "NOT_ALLOWED",
    epcache.NoSpace: "NO_SPACE",
    epcache.VersionMismatch: "VERSION",
    epcache.Unavailable: "UNAVAILABLE",
    epcache.Internal: "INTERNAL",
    epcache.Cancelled: "CANCELLED",
    epcache.ProtocolError: "PROTOCOL",
}


class Driver:
    """Answers questions; questions about one socket use the same client."""

    def __init__(self) -> None:
        self.socket = ""
        self.client = epcache.Client()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["do"] == "forget":
            self.client.close()
            self.socket = ""
            return {}
        if question["socket"] != self.socket:
            self.client.close()
            self.socket = question["socket"]
            hello = {"hello_limit": question["hello_ms"] / 1000} if "hello_ms" in question else {}
            self.client = epcache.Client(self.socket, restart_limit=1.0, **hello)
        try:
            return self.asked(question)
        except epcache.NoDaemon as error:
            return {"error": "NO_DAEMON", "text": str(error)}
        except Exception as error:
            return {"error": CLASSES.get(type(error), repr(error)), "text": str(error)}

    def asked(self, question: dict[str, Any]) -> dict[str, Any]:
        timeout = question["timeout_ms"] / 1000
        if question["do"] == "jobs":
            self.client.jobs(timeout=timeout)
            return {"outcome": "jobs"}
        phases: list[str] = []
        ep = epcache.ExecutionProvider("E", options={"o": "x" * question.get("options", 0)})
        with self.client.acquire(
            question["model"],
            ep,
            adopt=question.get("adopt", False),
            timeout=timeout,
            progress=lambda p: phases.append(p.phase),
        ) as artefact:
            result: dict[str, Any] = {"outcome": artefact.outcome, "phases": phases}
            if artefact.fd is not None:
                result["content"] = Path(artefact.path).read_text()
        return result


def main() -> None:
    driver = Driver()
    for line in sys.stdin:
        print(json.dumps(driver.answer(json.loads(line))), flush=True)


main()
