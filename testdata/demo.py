"""The demo: real models compiled once by a real execution provider, kept, and served to a second
application.

    demo.py [MODEL...]

Starts bin/epcached on a temporary state directory, and for each model compares an application
without epcached with the same application with it, each time in fresh processes. Then it restarts
the daemon and damages a stored byte, and shows that hits survive the restart and the damaged build
is not served. Leaves the table in report/demo.md; if there is a fault, it leaves none, and the exit
status is not 0.

DEMO_EP=openvino or qnn chooses the execution provider. Without it: OpenVINO if it lists a device;
else QNN, which compiles ahead of time on any x86-64, and then OpenVINO through the tests' shim, so
labelled. DEMO_REPORT names another file for the table.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent
BIN = Path(os.environ.get("EPCACHED_BIN") or PROJECT / "bin")
RUNTIMES = Path(os.environ.get("EPCACHED_RUNTIMES") or PROJECT / ".deps" / "runtimes")
MODELS = Path(os.environ.get("EPCACHED_MODELS") or PROJECT / ".deps" / "models")
REPORT = Path(os.environ.get("DEMO_REPORT") or PROJECT / "report" / "demo.md")
PROCESS_LIMIT = 300  # seconds

NEXT = """
What to try next, with a model of your own:
  make wheel                           the Python package, in dist/: doc/quickstart-python.md
  bin/epcachectl get MODEL --ep EP     compile a model, or find it compiled: README.md
  bin/epcachectl --help                all commands"""


@dataclass(frozen=True)
class Provider:
    title: str
    name: str
    runtime: str
    options: dict[str, str]
    models: tuple[str, ...]
    repeats: int  # fresh processes for each measurement of the time to first inference
    # largest difference to the uncompiled session, relative to the largest output
    tolerance: float
    note: str


OPENVINO = Provider(
    title="OpenVINO on the CPU",
    name="OpenVINOExecutionProvider",
    runtime="openvino-1.8.1",
    # Otherwise some processors compute in bf16, and the outputs differ by its rounding.
    options={"load_config": json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "f32"}})},
    models=(
        *(
            "silero-vad",
            "magika",
            "smart-turn",
            "rapidocr-det",
            "nudenet",
            "ddddocr-det",
            "minilm-int8",
            "minilm-fp32",
        ),
        "mlp-128mib",
    ),
    repeats=3,
    tolerance=1e-4,
    note="`INFERENCE_PRECISION_HINT` f32 everywhere, by the provider option `load_config`.",
)
QNN = Provider(
    title="QNN ahead of time, for an HTP",
    name="QNNExecutionProvider",
    runtime="qnn-2.7.0",
    options={"soc_model": "60", "enable_htp_fp16_precision": "1"},
    models=(
        "silero-vad",
        "magika",
        "nudenet",
        "ddddocr-det",
        "minilm-int8",
        "minilm-fp32",
        "mlp-128mib",
    ),
    repeats=1,
    tolerance=5e-3,
    note="The NPU is not in this machine: inference runs in QNN's simulator, and takes seconds "
    "whichever way the model was loaded. Half precision, hence the wider tolerance.",
)


@dataclass
class Row:
    model: str
    size: int
    compile: float = 0.0
    hit: float = 0.0
    ready: tuple[float, float] = (0.0, 0.0)  # without, with
    first: tuple[float, float] = (0.0, 0.0)
    equal: bool = False
    difference: float = 0.0


@dataclass
class Failures:
    texts: list[str] = field(default_factory=list)

    def unless(self, true: bool, text: str) -> None:
        if not true:
            self.texts.append(text)
            print(f"  NOT AS IT SHOULD BE: {text}", flush=True)


class Daemon:
    """bin/epcached on a state directory of its own."""

    def __init__(self, directory: Path, runtime: Path) -> None:
        self.directory, self.runtime = directory, runtime
        self.state, self.socket, self.log = (
            directory / "state",
            directory / "s",
            directory / "epcached.log",
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            BIN / "epcached",
            "--state",
            self.state,
            "--socket",
            self.socket,
            "--runtime",
            self.runtime,
        ]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        status = subprocess.run(
            [BIN / "epcachectl", "--socket", self.socket, "--wait", "10s", "status"],
            capture_output=True,
            text=True,
        )
        if status.returncode != 0:
            raise SystemExit(
                f"demo: the daemon does not start: {status.stderr}{self.log.read_text()}"
            )

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def blob(self, digest: str) -> Path:
        """Returns the stored file with that digest."""
        (path,) = [
            path
            for path in (self.state / "objects").rglob("*")
            if path.is_file() and digest.endswith(path.name)
        ]
        return path


class Application:
    """Runs demo_process.py, each time in a fresh process, with one runtime and one model."""

    def __init__(
        self, provider: Provider, directory: Path, socket: Path, model: dict[str, Any]
    ) -> None:
        self.provider, self.directory, self.model = provider, directory, model
        self.job = {
            "ep": provider.name,
            "options": provider.options,
            "model": model,
            "path": str(MODELS / model.get("path", "")),
            "socket": str(socket),
        }

    def run(self, what: str) -> dict[str, Any]:
        job = {**self.job, "outputs": str(self.outputs_of(what))}
        path = os.pathsep.join(
            map(str, [RUNTIMES / self.provider.runtime, PROJECT / "clients" / "python", HERE])
        )
        done = subprocess.run(
            [sys.executable, HERE / "demo_process.py", what],
            input=json.dumps(job),
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=PROCESS_LIMIT,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"{self.model.get('name', '')}: {what}: exit status {done.returncode}: "
                f"{done.stderr[-2000:]}"
            )
        return json.loads(done.stdout)

    def outputs_of(self, what: str) -> Path:
        return self.directory / f"{self.model.get('name', 'none')}-{what}.npz"

    def outputs(self, what: str) -> list[np.ndarray]:
        with np.load(self.outputs_of(what)) as file:
            return [file[name] for name in file.files]


def measure(application: Application, provider: Provider, failures: Failures) -> Row:
    """Fills one line of the table."""
    model = application.model
    row = Row(model["name"], model["size"])
    without = [application.run("plain") for _ in range(provider.repeats)]
    application.run("artefact")
    first = application.run("session")
    failures.unless(
        first["outcome"] == "compiled",
        f"{row.model}: first request: {first['outcome']}, not compiled",
    )
    row.compile = first["acquire"]
    with_cache = [application.run("session") for _ in range(provider.repeats)]
    outcomes = {one["outcome"] for one in with_cache}
    failures.unless(outcomes == {"hit"}, f"{row.model}: second request: {outcomes}, not hit")
    row.hit = application.run("hits")["median"]
    row.ready = (median(without, "ready"), median(with_cache, "ready"))
    row.first = (median(without, "first_inference"), median(with_cache, "first_inference"))
    compare(application, provider, row, failures)
    return row


def median(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def compare(application: Application, provider: Provider, row: Row, failures: Failures) -> None:
    served, own, uncompiled = (
        application.outputs(what) for what in ("session", "artefact", "plain")
    )
    row.equal = same(served, own)
    failures.unless(
        row.equal,
        f"{row.model}: what was served computes other bits than the artefact of plain ONNX Runtime",
    )
    row.difference = max(difference(a, b) for a, b in zip(served, uncompiled, strict=True))
    text = (
        f"{row.model}: differs by {row.difference:.1e} from the uncompiled session, more than "
        f"{provider.tolerance:.0e}"
    )
    failures.unless(row.difference <= provider.tolerance, text)


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs
    )


def difference(got: np.ndarray, want: np.ndarray) -> float:
    """Returns the largest difference, relative to the largest value; infinite if anything is not a
    number.
    """
    largest = float(np.abs(got.astype(np.float64) - want.astype(np.float64)).max())
    return (
        largest / max(float(np.abs(want.astype(np.float64)).max()), 1e-30)
        if np.isfinite(largest)
        else float("inf")
    )


def survive_a_restart(daemon: Daemon, applications: list[Application], failures: Failures) -> str:
    status = daemon.stop()
    failures.unless(status == 0, f"the daemon stopped with status {status}")
    daemon.start()
    for application in applications:
        name, before = application.model["name"], application.outputs("artefact")
        outcome = application.run("session")["outcome"]
        failures.unless(outcome == "hit", f"{name}: after a restart: {outcome}, not hit")
        failures.unless(
            same(application.outputs("session"), before), f"{name}: other outputs after a restart"
        )
    return (
        f"After a restart of the daemon {len(applications)} of {len(applications)} models were "
        "hits, with the same outputs."
    )


def refuse_damage(daemon: Daemon, application: Application, failures: Failures) -> str:
    """Flips one bit in the middle of the largest file of a stored artefact, unnoticed by the
    daemon.
    """
    name = application.model["name"]
    largest = max(application.run("hits")["files"], key=lambda file: file["size"])
    path = daemon.blob(largest["digest"])
    flip_a_bit(path)
    after = application.run("session")
    failures.unless(
        after["outcome"] == "compiled",
        f"{name}: damaged, and the answer is {after['outcome']}: {after['why']}",
    )
    failures.unless(
        same(application.outputs("session"), application.outputs("artefact")),
        f"{name}: other outputs after damage",
    )
    once_more = application.run("session")
    failures.unless(
        once_more["outcome"] == "hit", f"{name}: healed, and the answer is {once_more['outcome']}"
    )
    return (
        f"One bit of {name}'s stored artefact was flipped, in the middle of {largest['size']:,} "
        "bytes. The next request did not get "
        f"it: `{after['outcome']}`, “{shortened(after['why'])}”, with the right outputs; the one "
        "after that was a hit again."
    )


def flip_a_bit(path: Path) -> None:
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def shortened(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


COLUMNS = (
    "model",
    "size",
    "first request (compile)",
    "second request (hit, at the socket)",
    "session ready: without → with",
    "first inference: without → with",
    "bit-equal to plain ORT's artefact",
    "against the uncompiled session",
)


# The same for the terminal, which is narrower.
HEADS = (
    "model",
    "size",
    "compile",
    "hit",
    "session ready",
    "first inference",
    "bit-equal",
    "uncompiled",
)
WIDTHS = (13, 9, 8, 7, 18, 18, 9, 10)


def aligned(texts: Sequence[str]) -> str:
    return (
        "  "
        + "  ".join(text.ljust(width) for text, width in zip(texts, WIDTHS, strict=True)).rstrip()
    )


def cells(row: Row) -> list[str]:
    return [
        row.model,
        f"{row.size / 1e6:.1f} MB" if row.size >= 1e5 else f"{row.size / 1e3:.1f} kB",
        seconds(row.compile),
        f"{row.hit * 1e6:.0f} µs",
        f"{seconds(row.ready[0])} → {seconds(row.ready[1])}",
        f"{seconds(row.first[0])} → {seconds(row.first[1])}",
        "yes" if row.equal else "NO",
        "equal" if row.difference == 0 else f"{row.difference:.1e}",
    ]


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def markdown(table: list[list[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in [table[0], ["---"] * len(table[0]), *table[1:]]
    )


def show(provider: Provider, shimmed: bool, wanted: list[str], failures: Failures) -> str:
    """Runs everything on one execution provider; returns its part of the report."""
    listed = {
        model["name"]: model for model in json.loads((MODELS / "models.json").read_text())["models"]
    }
    names = wanted or list(provider.models)
    if unknown := set(names) - set(listed):
        raise RuntimeError(f"{MODELS}/models.json has no {', '.join(sorted(unknown))}")
    title = provider.title + (" (through the tests' shim)" if shimmed else "")
    print(f"\n{title}\n\n{aligned(HEADS)}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="epcached-demo-"))
    daemon = Daemon(directory, RUNTIMES / provider.runtime)
    rows, applications = [], []
    with running(daemon):
        # brings the libraries into the page cache
        Application(provider, directory, daemon.socket, {}).run("devices")
        for name in names:
            application = Application(provider, directory, daemon.socket, listed[name])
            rows.append(measure(application, provider, failures))
            applications.append(application)
            print(aligned(cells(rows[-1])), flush=True)
        proofs = [
            survive_a_restart(daemon, applications, failures),
            refuse_damage(daemon, applications[0], failures),
        ]
        if not failures.texts:  # after a failure these sentences would be wrong
            print("", *proofs, sep="\n  ", flush=True)
        failures.unless(daemon.stop() == 0, "the daemon stopped with an error")
    note = provider.note
    if shimmed:
        note += (
            " OpenVINO's plugin lists no device on this processor; a shim of the tests makes it. "
            "What it shows is epcached, not OpenVINO."
        )
    return "\n\n".join(
        [f"### {title}", markdown([list(COLUMNS), *map(cells, rows)]), note, *proofs]
    )


@contextlib.contextmanager
def running(daemon: Daemon) -> Iterator[None]:
    """Starts the daemon; stops it and removes its directory at the end, also after an error."""
    daemon.start()
    try:
        yield
    finally:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.process.terminate()
            try:
                daemon.process.wait(20)
            except subprocess.TimeoutExpired:
                daemon.process.kill()
        shutil.rmtree(daemon.directory)


def is_shimmed(provider: Provider) -> bool:
    package = RUNTIMES / provider.runtime / "onnxruntime_ep_openvino"
    return (RUNTIMES / provider.runtime / "ANYCPU").exists() or (
        package / "libvendor_openvino_plugin.so"
    ).exists()


def choose() -> tuple[list[Provider], list[str]]:
    """Returns the execution providers to show, and what is missing for the others."""
    wanted = os.environ.get("DEMO_EP", "").lower()
    if wanted not in ("", "openvino", "qnn"):
        raise SystemExit(f"demo: DEMO_EP={wanted}: it is openvino or qnn")
    order = {"openvino": [OPENVINO], "qnn": [QNN]}.get(wanted) or (
        [QNN, OPENVINO] if is_shimmed(OPENVINO) else [OPENVINO, QNN]
    )
    usable, missing = [], []
    for provider in order:
        if why := unusable(provider):
            missing.append(f"{provider.title}: {why}")
        else:
            usable.append(provider)
    if not wanted and usable[:1] == [OPENVINO] and not is_shimmed(OPENVINO):
        usable = [OPENVINO]  # a real device: QNN's simulator is not needed
    return usable, missing


def unusable(provider: Provider) -> str:
    if not (RUNTIMES / provider.runtime).is_dir():
        return (
            f"no {RUNTIMES / provider.runtime}: testdata/fetch-runtimes {RUNTIMES} "
            f"{provider.runtime}"
        )
    try:
        found = Application(provider, Path(tempfile.gettempdir()), Path(), {}).run("devices")
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if found["devices"] else "its plugin lists no device on this machine"


def machine() -> str:
    facts = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{facts[0] if facts else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"Linux {platform.release()}"
    )


def main(wanted: list[str]) -> int:
    started, failures = time.monotonic(), Failures()
    providers, missing = choose()
    for text in missing:
        print(f"demo: {text}")
    if not providers:
        print(
            "demo: no execution provider can be used here, so there is nothing to show",
            file=sys.stderr,
        )
        return 1
    try:
        parts = [
            show(provider, provider is OPENVINO and is_shimmed(provider), wanted, failures)
            for provider in providers
        ]
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    if failures.texts:
        print(
            f"\ndemo: {len(failures.texts)} things are not as they should be:",
            *failures.texts,
            sep="\n  ",
            file=sys.stderr,
        )
        return 1
    made = (
        f"Made by `make demo` on {time.strftime('%Y-%m-%d')}: {machine()}. Times are of this "
        "machine; every process was a fresh one."
    )
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text("\n\n".join([made, *parts]) + "\n")
    print(f"\n{os.path.relpath(REPORT)} has the table; {time.monotonic() - started:.0f} s.")
    print(NEXT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
