"""Requests a stored build beside threads that keep the interpreter, or the processors, busy."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import epcache
import onnxruntime as ort


def run(
    socket: str,
    path: str,
    ep: str,
    options: dict[str, str],
    loads: str,
    busy: int,
    threads: int,
    times: int,
) -> dict[str, Any]:
    """Returns how often each outcome, or error, came from requests by `threads` threads."""
    one = epcache.ExecutionProvider(ep, options=options)
    with epcache.Client(socket, hello_limit=10) as client:
        client.acquire(path, [one]).close()
    outcomes: Counter[str] = Counter()
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            pass

    def sessions(client: epcache.Client) -> None:
        for _ in range(times):
            try:
                with client.acquire(path, [one]) as artefact:
                    outcomes[artefact.outcome] += 1
                    if threads > 1:  # its threads take the processors
                        ort.InferenceSession(loads, providers=["CPUExecutionProvider"])
            except epcache.Error as error:
                outcomes[f"{type(error).__name__}: {error}"] += 1
            if threads == 1:
                client.close()  # as a first request, which has to connect

    with epcache.Client(socket) as client:
        for _ in range(busy):
            threading.Thread(target=spin, daemon=True).start()
        asking = [threading.Thread(target=sessions, args=(client,)) for _ in range(threads)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    ended.set()
    return {"outcomes": dict(outcomes)}
