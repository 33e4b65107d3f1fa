"""An application that requests models all the time, and loads each artefact with plain ONNX
Runtime.
"""

from __future__ import annotations

import glob
import importlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import epcache
import inference
import onnxruntime as ort

# The fields of each answer that are recorded.
ANSWER = (
    "outcome request_key build sdk_version why runtime compatibility compatibility_source "
    "compatibility_reason provider_options "
    "session_options"
).split()

# Part of the daemon's message if the library was replaced, and the application must be restarted.
REPLACED = "another file now"


def run(
    socket: str,
    ep: str,
    options: dict[str, str],
    model: str,
    said: str,
    stop: str,
    started: float,
    pause: float,
    requests: int,
) -> None:
    """Appends a line of JSON to the file `said` for each of so many requests, the first of them a
    `pause` after the start.

    It ends earlier if the file `stop` exists, or its libraries were replaced or do not load.
    Requests describe the loaded ONNX Runtime and the provider's library, as those of epcache's
    sessions do. Artefacts that are refused are copied to directories beside `said`.
    """
    library = importlib.import_module(inference.PACKAGES[ep]).get_library_path()
    descriptor = os.open(library, os.O_RDONLY)
    device = inference.device(ep)
    directory = os.path.join(os.path.dirname(ort.__file__), "capi")
    runtime = epcache.Runtime(
        ort_version=ort.__version__,
        ort_library=next(iter(glob.glob(f"{directory}/libonnxruntime.so.{ort.__version__}")), ""),
        libraries=(epcache.Library(ep, library, descriptor),),
    )
    opened = os.readlink(f"/proc/self/fd/{descriptor}")
    about = {
        "started": started,
        "ready": time.monotonic(),
        "process": os.getpid(),
        "onnxruntime": ort.__version__,
        "library": opened,
    }
    time.sleep(pause)
    with open(said, "a") as log, epcache.Client(socket, hello_limit=10) as client:
        for number in range(requests):
            if os.path.exists(stop):
                break
            record = one(
                client, Path(model), ep, options, runtime, device, f"{said}-{os.getpid()}-{number}"
            )
            log.write(json.dumps({**about, **record}) + "\n")
            log.flush()
            if REPLACED in record.get("error", "") or "refused" in record:
                break  # as an application that is restarted
            time.sleep(0.02)


def one(
    client: epcache.Client,
    model: Path,
    ep: str,
    options: dict[str, str],
    runtime: epcache.Runtime,
    device: Any,
    keep: str,
) -> dict[str, Any]:
    record: dict[str, Any] = {"asked": time.monotonic()}
    try:
        artefact = client.acquire(model, (f"{ep}:CPU", options), runtime=runtime, timeout=60)
    except epcache.Error as error:
        return {
            **record,
            "answered": time.monotonic(),
            "class": type(error).__name__,
            "error": str(error),
        }
    record["answered"] = time.monotonic()
    for name in ANSWER:
        record[name] = getattr(artefact, name)
    with artefact:
        try:
            load(artefact.path, ep, device, artefact.provider_options[ep], artefact.session_options)
            record["loaded"] = time.monotonic()
        except Exception as error:
            record["refused"] = f"{type(error).__name__}: {error}"
            record["refused_at"] = time.monotonic()
            shutil.copytree(artefact.view, keep)
            record["kept"] = os.path.join(keep, artefact.graph)
    return record


def load(
    path: str, ep: str, device: Any, options: dict[str, str], session_options: dict[str, str]
) -> None:
    settings = ort.SessionOptions()
    settings.log_severity_level = 4  # because the exception has the same text
    settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    for key, value in session_options.items():
        settings.add_session_config_entry(key, value)
    settings.add_provider_for_devices([device], inference.provider_options(ep, options))
    ort.InferenceSession(path, settings, enable_fallback=0)
