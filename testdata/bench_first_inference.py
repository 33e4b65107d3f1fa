"""Time to the first inference through epcached, next to ONNX Runtime that loads the same _ctx.onnx itself.

    bench_first_inference.py [MODEL...]

Every measurement is a process of its own. The clock runs from after the imports, the registration of the execution
provider included, until the first output is there. Both sides take turns, so that both see the same machine. Prints
medians and their ratio, one line a model. `make bench` sets EPCACHED_BIN, EPCACHED_RUNTIMES and EPCACHED_MODELS.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
EP = "OpenVINOExecutionProvider"
RUNS = 15
DEFAULT = ["tiny-mlp", "magika", "rapidocr-det", "smart-turn", "minilm-fp32", "mlp-128mib"]


def child(how: str, runtime: str, model: str, graph: str) -> None:
    """One measurement: prints seconds."""
    sys.path[:0] = [runtime, str(HERE.parent / "clients" / "python"), str(HERE)]
    import epcache
    import inputs
    import onnxruntime as ort
    import onnxruntime_ep_openvino

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
    print(json.dumps({"seconds": seconds, "outcome": outcome}))


def measure(how: str, runtime: Path, model: dict, graph: Path, socket: Path) -> float:
    out = subprocess.run(
        [sys.executable, __file__, "--child", how, str(runtime), json.dumps(model), str(graph)],
        env={**os.environ, "EPCACHE_SOCKET": str(socket)}, stdout=subprocess.PIPE, check=True, timeout=120)
    answer = json.loads(out.stdout.splitlines()[-1])
    wanted = "hit" if how == "epcached" else "plain"
    if answer["outcome"] != wanted:
        raise SystemExit(f"{model['name']}: outcome {answer['outcome']!r}, not {wanted!r}")
    return answer["seconds"]


def compare(model: dict, source: Path, runtime: Path, socket: Path, scratch: Path) -> None:
    """Compiles through epcached, copies what it serves into a plain folder, and measures both in turn."""
    control = Path(os.environ["EPCACHED_BIN"]) / "epcachectl"
    plain = scratch / model["name"]
    dimensions = [a for name, value in model["dimensions"].items() for a in ("--dim", f"{name}={value}")]
    subprocess.run([control, "get", source, "--socket", socket, "--ep", f"{EP}:CPU", *dimensions, "--out", plain],
                   check=True, stdout=subprocess.DEVNULL)
    graph = next(plain.rglob("*_ctx.onnx"))
    times: dict[str, list[float]] = {"epcached": [], "plain": []}
    for _ in range(RUNS):
        times["epcached"].append(measure("epcached", runtime, model, source, socket))
        times["plain"].append(measure("plain", runtime, model, graph, socket))
    through, alone = (statistics.median(times[how]) for how in ("epcached", "plain"))
    print(f"{model['name']:<14} {model['size'] / 1e6:7.1f} MB  through epcached {through * 1e3:7.1f} ms  "
          f"ORT alone {alone * 1e3:7.1f} ms  ratio {through / alone:.3f}  ({(through - alone) * 1e3:+.1f} ms)", flush=True)


def main(names: list[str]) -> None:
    runtime = Path(os.environ["EPCACHED_RUNTIMES"]) / "openvino-1.8.1"
    models = Path(os.environ["EPCACHED_MODELS"])
    listed = {m["name"]: m for m in json.loads((models / "models.json").read_text())["models"]}
    scratch = Path(tempfile.mkdtemp(prefix="epcached-bench-"))
    socket = scratch / "s"
    daemon = subprocess.Popen([Path(os.environ["EPCACHED_BIN"]) / "epcached", "--state", scratch / "state",
                               "--socket", socket, "--runtime", runtime, "--log-level", "error"])
    try:
        for name in names:
            compare(listed[name], models / listed[name]["path"], runtime, socket, scratch)
    finally:
        daemon.terminate()
        daemon.wait(30)
        shutil.rmtree(scratch)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main(sys.argv[1:] or DEFAULT)
