"""Measures the cost of `epcachectl run` for a Python program that does not benefit: at its start,
at the import of onnxruntime, and at a plain session.

    bench_run.py [RUNS]

Each measurement is a process of its own, timed from outside. Three variants alternate: the program
alone; with the hook of `run`; and under `epcachectl run`, which prints a summary at the end. Prints
medians and differences. Needs no daemon. `make bench` sets EPCACHED_BIN, EPCACHED_RUNTIMES and
EPCACHED_MODELS.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 21
HOOK = Path(__file__).resolve().parents[1] / "clients" / "python" / "epcache" / "_run" / "hook"
RUNTIME = "openvino-1.8.1"
SESSION = (
    "import onnxruntime; onnxruntime.InferenceSession({model!r}, "
    "providers=['CPUExecutionProvider'])"
)
PROGRAMS = {
    "start": "pass",
    "import onnxruntime": "import onnxruntime",
    "one session, on the CPU": SESSION,
}


def main(runs: int) -> None:
    runtime = Path(os.environ["EPCACHED_RUNTIMES"]) / RUNTIME
    model = str(Path(os.environ["EPCACHED_MODELS"]) / "tiny-mlp" / "model.onnx")
    control = str(Path(os.environ["EPCACHED_BIN"]) / "epcachectl")
    plain = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(runtime),
        "EPCACHE_AUTOSTART": "0",
    }
    with tempfile.TemporaryDirectory(prefix="epcached-run-") as directory:
        report = Path(directory) / "report"
        report.touch()
        hooked = {
            **plain,
            "PYTHONPATH": f"{HOOK}:{runtime}",
            "EPCACHE_RUN": '{"on_miss":"wait"}',
            "EPCACHE_RUN_REPORT": str(report),
        }
        for name, text in PROGRAMS.items():
            python = [sys.executable, "-c", text.format(model=model)]
            ways = {
                "alone": (python, plain),
                "hook": (python, hooked),
                "run": ([control, "run", "--", *python], plain),
            }
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(runs):
                for way, (command, environment) in ways.items():
                    times[way].append(seconds(command, environment))
            alone, hook, run = (statistics.median(times[way]) * 1e3 for way in ways)
            print(
                f"{name:<24} alone {alone:7.1f} ms  with the hook {hook - alone:+6.1f} ms  "
                f"under epcachectl run {run - alone:+6.1f} ms",
                flush=True,
            )


def seconds(command: list[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS)
