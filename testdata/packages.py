"""Packages that use ONNX Runtime, unchanged, under `epcachectl run` with OpenVINO: the same
results, and a hit at the second start.

    packages.py VENV [NAME...]

VENV is the environment of testdata/fetch-packages; the programs are those of package_programs.py.
Each runs without epcached first, then twice with it, in fresh processes and with a new store.
Leaves the table in report/packages.md. The exit status is not 0 if a result differs, or a session
was not served without a reason.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent
sys.path.insert(0, str(PROJECT / "clients" / "python" / "tests" / "real"))
sys.path.insert(0, str(PROJECT / "clients" / "python"))

from daemon import Daemon  # noqa: E402
from package_programs import PROGRAMS  # noqa: E402

BIN = Path(os.environ.get("EPCACHED_BIN") or PROJECT / "bin")
RUNTIME = (
    Path(os.environ.get("EPCACHED_RUNTIMES") or PROJECT / ".deps" / "runtimes") / "openvino-1.8.1"
)
EP = "OpenVINOExecutionProvider:CPU"
MARK = "RESULT "
LIMIT = 300  # seconds for one program
# Tolerance for single precision, relative to the largest number; positions in pictures are rounded
# to integers.
TOLERANCE = 1e-3
CACHED = ("hit", "compiled", "waited")


def started(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Runs a program and returns what it printed."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "EPCACHE_SOCKET")
    }
    ended = subprocess.run(
        command, env={**own, **environment}, capture_output=True, text=True, timeout=LIMIT
    )
    for line in ended.stdout.splitlines():
        if ended.returncode == 0 and line.startswith(MARK):
            return json.loads(line[len(MARK) :])
    raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr[-2000:]}")


def served(
    program: list[str], daemon: Daemon, directory: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs a program under epcachectl run; returns what it printed, and the report."""
    report = directory / "report.json"
    command = [
        f"{BIN}/epcachectl",
        "run",
        "--ep",
        EP,
        "--runtime",
        str(RUNTIME),
        f"--report={report}",
        "--json",
        "--",
        *program,
    ]
    return started(command, {"EPCACHE_SOCKET": daemon.socket}), json.loads(report.read_text())


def differs(one: Any, other: Any, scale: float = 0.0) -> float:
    """Returns the difference of two results; infinity if not only numbers differ."""
    if (
        isinstance(one, (int, float))
        and isinstance(other, (int, float))
        and not isinstance(one, bool)
    ):
        # scores and probabilities are relative to 1
        return abs(one - other) / max(abs(one), abs(other), scale, 1.0)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        numbers = [abs(x) for x in (*one, *other) if isinstance(x, (int, float))]
        return max(
            (differs(a, b, max(numbers, default=0.0)) for a, b in zip(one, other)), default=0.0
        )
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return max((differs(one[key], other[key]) for key in one), default=0.0)
    return 0.0 if one == other else math.inf


def row(name: str, python: str, daemon: Daemon, directory: Path) -> tuple[list[str], list[str]]:
    """Returns a line of the table, and the faults found."""
    program = [python, str(HERE / "package_programs.py"), name]
    plain = started(program, {})
    first, _ = served(program, daemon, directory)
    second, report = served(program, daemon, directory)
    difference = max(differs(plain["output"], run["output"]) for run in (first, second))
    sessions = report["sessions"]
    hits = [session for session in sessions if session["outcome"] == "hit"]
    reasons = {
        f"{Path(s['model']).name}: {brief(s['why'])}"
        for s in sessions
        if s["outcome"] not in CACHED
    } | set(report["notes"])
    wrong = []
    if difference > TOLERANCE:
        wrong.append(f"{name}: results differ by {difference:.1e}")
    if (
        len(hits) < len(sessions)
        and not all(s["why"] for s in sessions if s["outcome"] != "hit")
        or not sessions
    ):
        wrong.append(f"{name}: {len(hits)} hits of {len(sessions)} sessions, and no reason")
    times = [f"{run['seconds']:.2f} s" for run in (plain, first, second)]
    saved = f"{sum(s['compile_seconds'] for s in hits):.2f} s"
    equal = "equal" if difference == 0 else f"{difference:.0e}"
    return [
        name,
        f"{len(hits)} of {len(sessions)}",
        *times,
        saved,
        equal,
        "; ".join(sorted(reasons)) or "-",
    ], wrong


def brief(why: str) -> str:
    """Returns the lines of the compiler's message that name operators."""
    lines = [line.strip() for line in why.splitlines()]
    failed = [
        line.partition(" (")[0] for line in lines if line.startswith("-- Conversion is failed for")
    ]
    return failed[0].removeprefix("-- ") if failed else " ".join(lines)[:200]


HEAD = [
    "package",
    "hits at the second start",
    "alone, on the CPU",
    "first start",
    "second start",
    "compiling saved",
    "against alone",
    "what was not served",
]


def main(venv: str, names: list[str]) -> int:
    if unknown := set(names) - set(PROGRAMS):
        raise SystemExit(f"packages: no program for {', '.join(sorted(unknown))}")
    rows, wrong = [HEAD, ["---"] * len(HEAD)], []
    daemon = Daemon(BIN, [RUNTIME])
    try:
        with tempfile.TemporaryDirectory(prefix="epcached-packages-") as directory:
            for name in names or PROGRAMS:
                try:
                    line, faults = row(name, f"{venv}/bin/python", daemon, Path(directory))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    line, faults = [name, *["-"] * (len(HEAD) - 1)], [f"{name}: {error}"]
                rows.append(line)
                wrong += faults
                print("  ".join(line), flush=True)
    finally:
        daemon.close()
    (PROJECT / "report").mkdir(exist_ok=True)
    (PROJECT / "report" / "packages.md").write_text(
        "\n".join("| " + " | ".join(line) + " |" for line in rows) + "\n"
    )
    for fault in wrong:
        print(f"packages: {fault}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: packages.py VENV [NAME...]")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
