"""Measures the overhead of the Python client: on a hit, without a daemon, with a suspended one, and
at import.

    bench_overhead.py [MODEL...]

Every measurement is a process of its own; those that are compared alternate. Time is measured from
the end of the imports to the first output, including the registration of the execution provider. A
hit is compared with ONNX Runtime that loads the same files from a plain directory; a session
without a daemon with ONNX Runtime that compiles the model itself on the same execution provider.
Prints medians, ratio, difference and the goal. `make bench` sets EPCACHED_BIN, EPCACHED_RUNTIMES
and EPCACHED_MODELS.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import results
from bench_daemon import EP, daemon, importable, measured, models

RUNS = 15
DEFAULT = ["tiny-mlp", "magika", "rapidocr-det"]
NOWHERE = Path("/nonexistent/epcached.sock")


def child(how: str, model: str, graph: str) -> dict[str, Any]:
    """One measurement, in seconds."""
    importable()
    description = json.loads(model)
    import inputs
    import onnxruntime as ort
    import onnxruntime_ep_openvino

    start = time.perf_counter()
    if how == "client":
        import epcache

        # The package imports its modules at first use, which counts as import time.
        epcache.InferenceSession, epcache.SessionOptions  # noqa: B018
    imported = time.perf_counter() - start
    feed = inputs.make(description)
    start = time.perf_counter()
    if how == "client":
        options = epcache.SessionOptions()
        _fix(options, description)
        session = epcache.InferenceSession(graph, options, ep=f"{EP}:CPU")
        outcome = session.epcache.outcome
    else:
        ort.register_execution_provider_library(EP, onnxruntime_ep_openvino.get_library_path())
        devices = [d for d in ort.get_ep_devices() if d.ep_name == EP]
        options = ort.SessionOptions()
        _fix(options, description)
        options.add_provider_for_devices(devices[:1], {})
        session = ort.InferenceSession(graph, options)
        outcome = "plain"
    session.run(None, feed)
    return {"seconds": time.perf_counter() - start, "outcome": outcome, "import": imported}


def _fix(options: Any, description: dict[str, Any]) -> None:
    for name, value in description["dimensions"].items():
        options.add_free_dimension_override_by_name(name, value)


Measure = Callable[[], float]


def measure(how: str, outcome: str, model: dict[str, Any], graph: str, socket: Path) -> float:
    answer = measured(__file__, socket, how, json.dumps(model), graph)
    if answer["outcome"] != outcome:
        raise SystemExit(f"{model['name']}: outcome {answer['outcome']!r}, not {outcome!r}")
    if how == "client":
        imports.append(answer["import"])
    return float(answer["seconds"])


imports: list[float] = []  # of all measurements with the client


def compare(what: str, through: Measure, alone: Measure, most: float, ratio: float = 0.0) -> None:
    """Prints the medians of alternating measurements, and whether they keep to `most` seconds or
    the ratio.
    """
    through(), alone()  # to read the files into the page cache
    times = [(through(), alone()) for _ in range(RUNS)]
    ours, theirs = (statistics.median(side) for side in zip(*times, strict=True))
    kept = ours - theirs <= most or ours <= ratio * theirs
    goal = f"goal +{most * 1e3:.0f} ms" + (f" or {ratio:.2f}" if ratio else "")
    print(
        f"{what:<34} through epcached {ours * 1e3:7.1f} ms  ORT alone {theirs * 1e3:7.1f} ms  "
        f"ratio {ours / theirs:.3f}  "
        f"({(ours - theirs) * 1e3:+.1f} ms)  {goal}{'' if kept else ': missed'}",
        flush=True,
    )


def hit(model: dict[str, Any], socket: Path, scratch: Path) -> None:
    """Compiles through epcached, copies the artefact into a plain directory, and compares."""
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
    graph = str(next(plain.rglob("*_ctx.onnx")))
    compare(
        f"hit, {model['name']}",
        lambda: measure("client", "hit", model, model["file"], socket),
        lambda: measure("plain", "plain", model, graph, socket),
        0.003,
        1.05,
    )


def without(what: str, model: dict[str, Any], socket: Path, most: float) -> None:
    compare(
        f"{what}, {model['name']}",
        lambda: measure("client", "no daemon", model, model["file"], socket),
        lambda: measure("plain", "plain", model, model["file"], socket),
        most,
    )


@contextlib.contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def main(names: list[str]) -> None:
    os.environ["EPCACHE_AUTOSTART"] = "0"
    os.environ["PYTHONWARNINGS"] = "ignore"
    known = models()
    with daemon() as (scratch, socket, process):
        # Byte code, as after an installation by pip.
        os.environ.update(PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=str(scratch / "bytecode"))
        for name in names:
            hit(known[name], socket, scratch)
        without("no daemon, no autostart", known[names[0]], NOWHERE, 0.002)
        with stopped(process):
            without("stopped daemon", known[names[0]], socket, 0.060)
    ours = statistics.median(imports)
    print(
        f"{'import, beyond onnxruntime':<34} {ours * 1e3:.1f} ms  goal 30 "
        f"ms{'' if ours <= 0.030 else ': missed'}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        results.tell(child, *sys.argv[2:])
    else:
        main(sys.argv[1:] or DEFAULT)
