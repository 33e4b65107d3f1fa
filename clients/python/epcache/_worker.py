"""Compiles in a child process: epcached's worker, with the application's libraries.

A crash of a vendor's compiler ends only that process. The protocol is that of
compilers/workerproto: one line of JSON to descriptor 3, lines of JSON from descriptor 4, the last
one with a result or a refusal.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import _errors, _programs
from ._fields import dataclass

PROGRAM = "epcached-ort"
PROGRAM_VARIABLE = "EPCACHE_WORKER"

VERSION = 5  # of the protocol
MAX_ANSWER = 16 << 20  # bytes of all answers
DIALOGUE, SETUP, SIGNAL = 61, 62, 128  # exit statuses
GRACE = 3.0  # seconds for a killed process to exit
MAX_OUTPUT = 2048  # bytes of the end of its output that an error contains

# Signals that other processes send, and that are not caused by a crash.
FROM_OUTSIDE = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGXCPU,
)


class NoWorker(Exception):
    """The worker cannot be started, or has another version. The compile has not begun."""


@dataclass(frozen=True)
class Result:
    ort_version: str
    seconds: float
    versions: list[tuple[str, str]]  # of the execution providers
    logged: tuple[str, ...] = ()  # as errors, by ONNX Runtime


def find() -> str:
    """Returns the worker's path: EPCACHE_WORKER, else the installed one; "" if there is none."""
    return _programs.find(PROGRAM, PROGRAM_VARIABLE, _programs.DIRECTORIES)


def compile(
    program: str,
    request: dict[str, Any],
    deadline: float,
    on_phase: Callable[[str], None],
    name: str = "",
) -> Result:
    """Runs the worker on a request and returns its result. `on_phase` gets each phase.

    With `name` the worker gets the model under that file name, because compilers write the path
    into their output, which must not depend on it. Raises CompileFailed, DeadlineExceeded at
    `deadline` (of time.monotonic()), and NoWorker if the worker cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="epcache-worker-") as above:
        directory = os.path.join(above, "out", ".worker")
        os.makedirs(directory)
        if name:
            os.mkdir(os.path.join(above, "model"))
            os.symlink(request["Model"], os.path.join(above, "model", name))
            request = {**request, "Model": os.path.join("..", "..", "model", name)}
        line = json.dumps({"Version": VERSION, "Do": "compile", **request}).encode() + b"\n"
        libraries = [ep["Library"] for ep in request.get("EPs", ())]
        process = _Process(program, directory, line, deadline, libraries)
        try:
            last: dict[str, Any] = {}
            for event in process.events(deadline):
                on_phase(event.get("Phase") or "")
                last = event
            # After the result or the end of the answers the worker exits.
            status = process.wait(min(deadline, time.monotonic() + GRACE))
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise _errors.DeadlineExceeded("the compile reached its time limit") from None
            status = None
        finally:
            process.end()
        return _result(last, status, process.output_end())


def _result(last: dict[str, Any], status: int | None, words: str) -> Result:
    done, refusal = last.get("Result"), last.get("Refusal")
    if done is not None:
        made = [
            (str(ep.get("Name", "")), str(ep.get("Version", ""))) for ep in done.get("EPs") or []
        ]
        logged = [str(text) for text in done.get("Errors") or []]
        return Result(
            str(done.get("ORTVersion", "")), float(done.get("Seconds", 0.0)), made, tuple(logged)
        )
    if refusal is not None:
        code = int(refusal.get("Code", -1))
        text = f"{refusal.get('Doing', 'compile')}: {refusal.get('Text', '')}"
        raise _errors.CompileFailed(text, facts={"reason": "refused", "code": str(code)})
    if status in (DIALOGUE, SETUP, 126, 127):  # the last two are the shell's
        raise NoWorker(words or f"the worker exited with status {status}")
    raise _crash(status, words)


def _crash(status: int | None, words: str) -> _errors.CompileFailed:
    facts = {"stderr": words}
    if status is not None and status > SIGNAL:
        number = status - SIGNAL
        name = signal_name(number)
        facts.update(signal=name, reason="worker died" if number in FROM_OUTSIDE else "crash")
        how = f"the compiler {'was ended' if number in FROM_OUTSIDE else 'crashed'} ({name})"
    else:
        facts.update(exit=str(status), reason="crash")
        how = f"the compiler exited without a result, with status {status}"
    last = words.rstrip().rpartition("\n")[2]
    return _errors.CompileFailed(f"{how}: {last}" if last else how, facts=facts)


def signal_name(number: int) -> str:
    """Returns the signal's name, such as "SIGSEGV"."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class _Process:
    """A running worker. Its output is written to a file."""

    def __init__(
        self, program: str, directory: str, line: bytes, deadline: float, libraries: list[str]
    ) -> None:
        self._directory = directory
        self._status: int | None = None
        self._reaped = False
        request = os.path.join(directory, "request")
        with open(request, "xb") as file:
            file.write(line)
        with contextlib.ExitStack() as stack:
            opened = []
            for path, flags in (
                (os.devnull, os.O_RDONLY),
                (self._output, os.O_WRONLY | os.O_CREAT),
                (request, os.O_RDONLY),
            ):
                opened.append(_programs.move_above_10(os.open(path, flags | os.O_CLOEXEC, 0o600)))
                stack.callback(os.close, opened[-1])
            self._answers, ours = os.pipe()
            answers = _programs.move_above_10(ours)
            stack.callback(os.close, answers)
            # Not subprocess, because it cannot renumber descriptors.
            devnull, output, request_fd = opened
            descriptors = (devnull, output, output, request_fd, answers)
            limits = json.dumps(
                {
                    "CPU": max(1, int(deadline - time.monotonic()) * (os.cpu_count() or 1)),
                    "Libraries": libraries,
                }
            )
            command = [
                "/bin/sh",
                "-c",
                'cd "$0" && exec "$@"',
                directory,
                program,
                "prepare",
                limits,
            ]
            try:
                self._pid = os.posix_spawn(
                    command[0],
                    command,
                    _environment(directory),
                    file_actions=_programs.only_descriptors(descriptors),
                    setsid=True,
                )
            except OSError as error:
                os.close(self._answers)
                raise NoWorker(f"{program}: {error.strerror}") from error

    @property
    def _output(self) -> str:
        return os.path.join(self._directory, "said")

    def events(self, deadline: float) -> Iterator[dict[str, Any]]:
        """Yields the worker's answers; the last one is the result or refusal. Raises TimeoutError
        at the deadline.
        """
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        rest, total = b"", 0
        while True:
            left = deadline - time.monotonic()
            if not poll.poll(max(0.0, min(left, 3600.0)) * 1000):
                if left <= 0:  # nothing had come after the deadline
                    raise TimeoutError
                continue
            part = os.read(self._answers, 1 << 16)
            total += len(part)
            if not part or total > MAX_ANSWER:
                return
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                # a line that is not JSON is skipped
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict):
                        yield event
                        if "Result" in event or "Refusal" in event:
                            return

    def wait(self, deadline: float) -> int | None:
        """Returns the exit status, None if other code of this process reaped it. Raises
        TimeoutError at the deadline.
        """
        while True:
            late = time.monotonic() >= deadline
            if self._reap():
                return self._status
            if late:
                raise TimeoutError
            time.sleep(0.002)

    def _reap(self) -> bool:
        if not self._reaped:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self._pid, -1
            if pid:
                self._reaped = True
                self._status = None if status == -1 else _shell_status(status)
        return self._reaped

    def end(self) -> None:
        """Kills the worker and its children, if they are still running."""
        os.close(self._answers)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._reap():
                os.kill(self._pid, signal.SIGTERM)  # the worker then kills its children
                with contextlib.suppress(TimeoutError):
                    self.wait(time.monotonic() + GRACE)
            if not self._reap():
                os.killpg(self._pid, signal.SIGKILL)
                with contextlib.suppress(TimeoutError):
                    self.wait(time.monotonic() + GRACE)

    def output_end(self) -> str:
        with contextlib.suppress(OSError), open(self._output, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_OUTPUT))
            return file.read(MAX_OUTPUT).decode(errors="replace").strip()
        return ""


def _shell_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return SIGNAL - code if code < 0 else code


def _environment(directory: str) -> dict[str, str]:
    """Returns the environment of the daemon's workers, with this process's library paths."""
    own = {
        name: os.environ[name] for name in ("LD_LIBRARY_PATH", "LD_PRELOAD") if name in os.environ
    }
    places = {"HOME": directory, "TMPDIR": directory, "XDG_CACHE_HOME": directory, "PWD": directory}
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "GOTRACEBACK": "single",
        "ORT_DISABLE_TELEMETRY": "1",
        **places,
        **own,
    }
