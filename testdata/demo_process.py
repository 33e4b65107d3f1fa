"""One fresh process of the demo, as an application would be: demo_process.py WHAT, a JSON object on
standard input.

WHAT is one of

    devices     the execution provider's devices, as ONNX Runtime lists them
    plain       the uncompiled model by plain ONNX Runtime, timed to its first output
    artefact    the model compiled, loaded and run by plain ONNX Runtime alone
    session     the same application with epcache.InferenceSession
    hits        requests for the model on an open connection, timed at the socket

The object has "ep", "options", "model" (an entry of models.json), "path", "socket" and "outputs", a
file that the model's outputs are written to. The result is all of standard output, as JSON: what
execution providers print is on standard error.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import inputs
import numpy as np
import onnxruntime as ort
import results

PACKAGES = {
    "OpenVINOExecutionProvider": "onnxruntime_ep_openvino",
    "QNNExecutionProvider": "onnxruntime_qnn",
}
HITS = 200


def devices(job: dict[str, Any]) -> dict[str, Any]:
    ort.register_execution_provider_library(job["ep"], library(job))
    return {
        "devices": [d.device.type.name for d in ort.get_ep_devices() if d.ep_name == job["ep"]],
        "ort": ort.__version__,
    }


def library(job: dict[str, Any]) -> str:
    return str(import_module(PACKAGES[job["ep"]]).get_library_path())


def plain_options(job: dict[str, Any]) -> ort.SessionOptions:
    """Makes a session on the execution provider without epcached."""
    ort.register_execution_provider_library(job["ep"], library(job))
    options = ort.SessionOptions()
    for name, size in job["model"]["dimensions"].items():
        options.add_free_dimension_override_by_name(name, size)
    settings = dict(job["options"])
    if job["ep"] == "QNNExecutionProvider":
        settings["backend_path"] = str(Path(library(job)).with_name("libQnnHtp.so"))
    options.add_provider_for_devices(
        [d for d in ort.get_ep_devices() if d.ep_name == job["ep"]][:1], settings
    )
    return options


def plain(job: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    session = ort.InferenceSession(job["path"], plain_options(job), enable_fallback=0)
    ready = time.perf_counter()
    save(job, session.run(None, inputs.make(job["model"])))
    return {"ready": ready - started, "first_inference": time.perf_counter() - started}


def artefact(job: dict[str, Any]) -> dict[str, Any]:
    # The level at which a session optimises before execution providers choose their nodes, and the
    # level of epcached.
    level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options = plain_options(job)
    with tempfile.TemporaryDirectory() as directory:
        graph = f"{directory}/0123456789abcdef_ctx.onnx"
        started = time.perf_counter()
        ort.ModelCompiler(options, job["path"], graph_optimization_level=level).compile_to_file(
            graph
        )
        seconds = time.perf_counter() - started
        session = ort.InferenceSession(graph, options, enable_fallback=0)
        save(job, session.run(None, inputs.make(job["model"])))
    return {"compile": seconds}


def session(job: dict[str, Any]) -> dict[str, Any]:
    import epcache

    warnings.simplefilter("error")  # so that a session that is not from the cache is an error
    started = time.perf_counter()
    options = epcache.SessionOptions()
    for name, size in job["model"]["dimensions"].items():
        options.add_free_dimension_override_by_name(name, size)
    client = epcache.Client(job["socket"], hello_limit=5)
    made = epcache.InferenceSession(
        job["path"], options, ep=(job["ep"], job["options"]), client=client
    )
    ready = time.perf_counter()
    save(job, made.run(None, inputs.make(job["model"])))
    report = made.epcache
    return {
        "outcome": report.outcome,
        "why": report.why,
        "acquire": report.acquire_seconds,
        "ready": ready - started,
        "first_inference": time.perf_counter() - started,
    }


def hits(job: dict[str, Any]) -> dict[str, Any]:
    import epcache
    from epcache import _plugins

    runtime = _plugins.runtime([_plugins.plugin(epcache.ExecutionProvider(job["ep"]))])
    seconds, files = [], []
    with epcache.Client(job["socket"], hello_limit=5) as client:
        for _ in range(HITS):
            found = client.acquire(
                job["path"],
                (job["ep"], job["options"]),
                dims=job["model"]["dimensions"],
                runtime=runtime,
                on_miss="fail",
            )
            with found:
                seconds.append(found.round_trip_seconds)
                files = [{"size": file.size, "digest": file.digest} for file in found.files]
    return {"median": statistics.median(seconds), "files": files}


def save(job: dict[str, Any], outputs: list[np.ndarray]) -> None:
    np.savez(job["outputs"], *outputs)


if __name__ == "__main__":
    ort.set_default_logger_severity(3)
    measure = {
        "devices": devices,
        "plain": plain,
        "artefact": artefact,
        "session": session,
        "hits": hits,
    }[sys.argv[1]]
    results.tell(measure, json.load(sys.stdin))
