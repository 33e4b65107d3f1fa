"""Time to the first inference through epcached, next to ONNX Runtime that loads the same _ctx.onnx
itself.

    bench_first_inference.py [MODEL...]

Every measurement is a process of its own. Time is measured from the end of the imports to the first
output, including the registration of the execution provider. Both alternate, so that both see the
same machine. Prints medians and their ratio, one line a model. `make bench` sets EPCACHED_BIN,
EPCACHED_RUNTIMES and EPCACHED_MODELS.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import results
from bench_daemon import EP, daemon, importable, measured, models

RUNS = 15
DEFAULT = ["tiny-mlp", "magika", "rapidocr-det", "smart-turn", "minilm-fp32", "mlp-128mib"]


def child(how: str, model: str, graph: str) -> dict[str, Any]:
    """One measurement, in seconds."""
    importable()
    import epcache
    import inputs
    import onnxruntime as ort
    import onnxruntime_ep_openvino

    # imports the package, which is not measured here
    epcache.InferenceSession, epcache.SessionOptions  # noqa: B018
    description = json.loads(model)
    feed = inputs.make(description)
    start = time.perf_counter()
    if how == "epcached":
        options = epcache.SessionOptions()
        for name, value in description["dimensions"].items():
            options.add_free_dimension_override_by_name(name, value)
        session = epcache.InferenceSession(graph, options, ep=f"{EP}:CPU")
        outcome = session.epcache.outcome
    else:
        ort.register_execution_provider_library(EP, onnxruntime_ep_openvino.get_library_path())
        devices = [d for d in ort.get_ep_devices() if d.ep_name == EP]
        options = ort.SessionOptions()
        options.add_provider_for_devices(devices[:1], {})
        session = ort.InferenceSession(graph, options)
        outcome = "plain"
    session.run(None, feed)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "outcome": outcome}


def measure(how: str, model: dict[str, Any], graph: Path, socket: Path) -> float:
    answer = measured(__file__, socket, how, json.dumps(model), str(graph))
    wanted = "hit" if how == "epcached" else "plain"
    if answer["outcome"] != wanted:
        raise SystemExit(f"{model['name']}: outcome {answer['outcome']!r}, not {wanted!r}")
    return answer["seconds"]


def compare(model: dict[str, Any], socket: Path, scratch: Path) -> None:
    """Compiles through epcached, copies the artefact into a plain directory, and measures both
    alternately.
    """
    control = Path(os.environ["EPCACHED_BIN"]) / "epcachectl"
    plain = scratch / model["name"]
    dimensions = [
        a for name, value in model["dimensions"].items() for a in ("--dim", f"{name}={value}")
    ]
    subprocess.run(
        [
            control,
            "get",
            model["file"],
            "--socket",
            socket,
            "--ep",
            f"{EP}:CPU",
            *dimensions,
            "--out",
            plain,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    graph = next(plain.rglob("*_ctx.onnx"))
    times: dict[str, list[float]] = {"epcached": [], "plain": []}
    for _ in range(RUNS):
        times["epcached"].append(measure("epcached", model, Path(model["file"]), socket))
        times["plain"].append(measure("plain", model, graph, socket))
    through, alone = (statistics.median(times[how]) for how in ("epcached", "plain"))
    print(
        f"{model['name']:<14} {model['size'] / 1e6:7.1f} MB  through epcached "
        f"{through * 1e3:7.1f} ms  "
        f"ORT alone {alone * 1e3:7.1f} ms  ratio {through / alone:.3f}  "
        f"({(through - alone) * 1e3:+.1f} ms)",
        flush=True,
    )


def main(names: list[str]) -> None:
    known = models()
    with daemon() as (scratch, socket, _):
        for name in names:
            compare(known[name], socket, scratch)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        results.tell(child, *sys.argv[2:])
    else:
        main(sys.argv[1:] or DEFAULT)
