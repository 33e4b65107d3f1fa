"""Measures a miss through epcached, and the same compile in the application's own process.

    bench_miss.py [MODEL...]

Every measurement is a process of its own, that has imported ONNX Runtime and registered the
execution provider, as any application does. Time is measured until the compiled model can be
loaded: epcached hashes, compiles in a worker, checks the load, stores and syncs. Each time the
model is a new file, so that nothing is cached. Both alternate. Prints medians, their ratio, and the
goal of 1.1 x + 0.3 s. `make bench` sets EPCACHED_BIN, EPCACHED_RUNTIMES and EPCACHED_MODELS.

Both compile at the level "basic", which is epcached's and a session's: ModelCompiler's own default
folds nothing before the execution provider sees the model, which is another compile with another
result. That both results have the same size is looked at.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import results
from bench_daemon import EP, daemon, importable, measured, models

RUNS = 5
NAMES = 256  # bytes by which two results of the same compile may differ, because they contain names
DEFAULT = ["tiny-mlp", "magika", "rapidocr-det", "smart-turn", "minilm-fp32", "mlp-128mib"]


def child(how: str, description: str, graph: str, out: str) -> dict[str, Any]:
    """One measurement, in seconds."""
    importable()
    import epcache
    import onnxruntime as ort
    import onnxruntime_ep_openvino

    dimensions: dict[str, int] = json.loads(description)["dimensions"]
    ort.register_execution_provider_library(EP, onnxruntime_ep_openvino.get_library_path())
    device = next(d for d in ort.get_ep_devices() if d.ep_name == EP)
    client = epcache.Client()
    Path(out).mkdir()
    start = time.perf_counter()
    if how == "epcached":
        with client.acquire(graph, f"{EP}:CPU", dims=dimensions) as artefact:
            seconds = time.perf_counter() - start
            outcome, size = artefact.outcome, sum(f.size for f in artefact.files)
    else:
        options = ort.SessionOptions()
        for name, value in dimensions.items():
            options.add_free_dimension_override_by_name(name, value)
        options.add_provider_for_devices([device], {})
        compiler = ort.ModelCompiler(
            options,
            graph,
            embed_compiled_data_into_model=False,
            graph_optimization_level=ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        )
        compiler.compile_to_file(str(Path(out) / "m_ctx.onnx"))
        seconds = time.perf_counter() - start
        outcome, size = "compiled", sum(f.stat().st_size for f in Path(out).iterdir())
    return {"seconds": seconds, "outcome": outcome, "size": size}


def compare(
    model: dict[str, Any], scratch: Path, socket: Path, runs: int = RUNS, quiet: bool = False
) -> None:
    control = Path(os.environ["EPCACHED_BIN"]) / "epcachectl"
    times: dict[str, list[float]] = {"epcached": [], "application": []}
    sizes: dict[str, int] = {}
    for run in range(runs):
        for how, seconds in times.items():
            directory = scratch / f"{model['name']}-{how}-{run}"
            shutil.copytree(Path(model["file"]).parent, directory)
            graph = directory / Path(model["file"]).name
            answer = measured(
                __file__, socket, how, json.dumps(model), str(graph), str(directory / "out")
            )
            if answer["outcome"] != "compiled":
                raise SystemExit(
                    f"{model['name']} {how}: outcome {answer['outcome']!r}, not 'compiled'"
                )
            seconds.append(answer["seconds"])
            sizes[how] = answer["size"]
            shutil.rmtree(directory)
        subprocess.run(
            [control, "rm", "--all", "-f", "--socket", socket],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    if abs(sizes["epcached"] - sizes["application"]) > NAMES:
        raise SystemExit(
            f"{model['name']}: {sizes['epcached']} bytes through epcached, "
            f"{sizes['application']} in the application: not the same compile"
        )
    if quiet:
        return
    through, alone = (statistics.median(times[how]) for how in ("epcached", "application"))
    print(
        f"{model['name']:<14} {model['size'] / 1e6:7.1f} MB  miss {through:7.3f} s  in the "
        f"application {alone:7.3f} s  "
        f"ratio {through / alone:5.2f}  {through - (1.1 * alone + 0.3):+.3f} s from the goal of "
        f"{1.1 * alone + 0.3:.3f} s",
        flush=True,
    )


def main(names: list[str]) -> None:
    known = models()
    with daemon() as (scratch, socket, _):
        # the daemon probes the runtime
        compare(known[names[0]], scratch, socket, runs=1, quiet=True)
        for name in names:
            compare(known[name], scratch, socket)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        results.tell(child, *sys.argv[2:])
    else:
        main(sys.argv[1:] or DEFAULT)
