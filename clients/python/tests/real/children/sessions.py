"""Sessions of an application, made in sequence, and their results."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import epcache
import inference
import onnxruntime as ort


def run(
    model: dict[str, Any],
    path: str,
    ep: Any,
    times: int = 1,
    truncate_in: str = "",
    on_miss: str = "wait",
    plain: bool = False,
) -> dict[str, Any]:
    """Makes `times` sessions on `ep`; `plain` ones use no daemon. With `truncate_in`, a daemon's
    state directory, each artefact is truncated before its load.

    Returns the version of ONNX Runtime, and for each session its report, providers, outputs, the
    providers that ran the nodes, the warnings and the seconds it took; or "error" with the name of
    the exception's class.
    """
    ep = ep if isinstance(ep, str) else tuple(ep)
    with tempfile.TemporaryDirectory(prefix="epcached-profile-") as directory:
        return {
            "version": ort.__version__,
            "sessions": [
                one(model, path, ep, directory, truncate_in, on_miss, plain) for _ in range(times)
            ],
        }


def one(
    model: dict[str, Any],
    path: str,
    ep: Any,
    directory: str,
    truncate_in: str,
    on_miss: str,
    plain: bool,
) -> dict[str, Any]:
    options = epcache.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(Path(directory) / "profile")
    for name, value in model["dimensions"].items():
        options.add_free_dimension_override_by_name(name, value)
    client = Truncating(truncate_in) if truncate_in else False if plain else None
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            session = epcache.InferenceSession(path, options, ep=ep, client=client, on_miss=on_miss)
        except Exception as error:
            return {
                "error": type(error).__name__,
                "text": str(error),
                "seconds": time.monotonic() - started,
            }
    seconds = time.monotonic() - started
    arrays = inference.outputs(session, model)
    report = session.epcache
    return {
        "outcome": report.outcome,
        "why": report.why,
        "request_key": report.request_key,
        "build": report.build,
        "path": report.path,
        "providers": session.get_providers(),
        "outputs": inference.exact(arrays),
        "values": [array.tolist() for array in arrays],
        "executed by": inference.executed_by(session.end_profiling()),
        "warnings": [
            str(w.message) for w in caught if issubclass(w.category, epcache.EpcacheWarning)
        ],
        "seconds": seconds,
    }


class Truncating(epcache.Client):
    """Truncates the context binary between the daemon's answer and the load, like a disk that loses
    data.
    """

    def __init__(self, state: str) -> None:
        super().__init__()
        self.state = Path(state)

    def acquire(self, *arguments: Any, **wishes: Any) -> epcache.Artefact:
        artefact = super().acquire(*arguments, **wishes)
        for file in artefact.files:
            if not file.name.endswith(".onnx"):
                os.truncate(self.state / "objects" / file.digest[:2] / file.digest, file.size // 2)
        return artefact
