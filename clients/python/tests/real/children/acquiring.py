"""Requests a model without loading it."""

from __future__ import annotations

import os
import time
from typing import Any

import epcache


def run(
    socket: str, path: str, ep: str, runtime: str, dims: dict[str, int], said: str, go: str
) -> dict[str, Any]:
    """Returns the outcome, the build and its files. Sends the request when the file `go` exists.
    Appends "ready" and each phase of progress to the file `said`.
    """

    def say(word: str) -> None:
        with open(said, "a") as file:
            file.write(word + "\n")

    with epcache.Client(socket, hello_limit=10) as client:
        say("ready")
        while not os.path.exists(go):
            time.sleep(0.005)
        with client.acquire(
            path, ep, runtime=runtime, dims=dims, progress=lambda progress: say(progress.phase)
        ) as artefact:
            files = [(file.name, file.size, file.digest) for file in artefact.files]
            sizes = [os.stat(file.name, dir_fd=artefact.fd).st_size for file in artefact.files]
            return {
                "outcome": artefact.outcome,
                "build": artefact.build,
                "graph": artefact.graph,
                "files": files,
                "sizes": sizes,
            }
