"""Compiles in a process of its own: epcached's worker, started by the application, with the
application's libraries.

A vendor's compiler that crashes takes that process and nothing else. The dialogue is that of
compilers/workerproto: one line of JSON to descriptor 3, lines of JSON from descriptor 4, the last
with a result or a refusal.
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

VERSION = 5  # of the dialogue
MAX_SAID = 16 << 20  # bytes of the whole dialogue
DIALOGUE, SETUP, SIGNAL = 61, 62, 128  # exit statuses
GRACE = 3.0  # for what was killed to go away
LAST_WORDS = 2048  # bytes

# Signals that a process is sent by others, and does not bring upon itself.
FROM_OUTSIDE = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGXCPU,
)


class NoWorker(Exception):
    """The worker cannot be started here, or is of another version: what was to be done has not
    begun.
    """


@dataclass(frozen=True)
class Result:
    ort_version: str
    seconds: float
    versions: list[tuple[str, str]]  # of the execution providers
    logged: tuple[str, ...] = ()  # as errors, by ONNX Runtime


def find() -> str:
    """Returns the worker's path, "" where there is none: EPCACHE_WORKER, else that of this package,
    beside other programs or of an installed epcached.
    """
    return _programs.find(PROGRAM, PROGRAM_VARIABLE, _programs.DIRECTORIES)


def compile(
    program: str,
    request: dict[str, Any],
    deadline: float,
    told: Callable[[str], None],
    name: str = "",
) -> Result:
    """Writes a copy of a model's compiled form into a directory, from the cache or after a compile.

        ep = "OpenVINOExecutionProvider:CPU"
        made = epcache.compile("model.onnx", "compiled/", options, ep=ep)
        made.path                       # compiled/0123456789abcdef_ctx.onnx

    The copy needs no daemon and no lease. Load it with the options of the result; the application
    is not told when it becomes stale. `on_miss` is wait, fail or refresh. Raises FileExistsError if
    another file of that name exists, unless `overwrite`; Unavailable, with the reason, if the cache
    cannot be asked for this model; and the errors of Client.acquire.
    """
    with tempfile.TemporaryDirectory(prefix="epcache-worker-") as above:
        directory = os.path.join(above, "out", ".worker")
        os.makedirs(directory)
        if name:
            os.mkdir(os.path.join(above, "model"))
            os.symlink(request["Model"], os.path.join(above, "model", name))
            request = {**request, "Model": os.path.join("..", "..", "model", name)}
        line = json.dumps({"Version": VERSION, "Do": "compile", **request}).encode() + b"\n"
        process = _Process(program, directory, line, deadline)
        try:
            last: dict[str, Any] = {}
            for event in process.events(deadline):
                told(event.get("Phase") or "")
                last = event
            # It has said its last word, or closed its mouth.
            status = process.wait(min(deadline, time.monotonic() + GRACE))
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise _errors.DeadlineExceeded("the compile reached its time limit") from None
            status = None
        finally:
            process.end()
        return _result(last, status, process.last_words())


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
    if status in (DIALOGUE, SETUP, 126, 127):  # the last two are the shell's own
        raise NoWorker(words or f"it ended with {status}")
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
        how = f"the compiler ended without a result, with status {status}"
    last = words.rstrip().rpartition("\n")[2]
    return _errors.CompileFailed(f"{how}: {last}" if last else how, facts=facts)


def signal_name(number: int) -> str:
    """Returns "SIGSEGV" and the like."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class _Process:
    """A worker that runs, with everything that it prints in a file."""

    def __init__(self, program: str, directory: str, line: bytes, deadline: float) -> None:
        self._directory = directory
        self._status: int | None = None
        self._gone = False
        request = os.path.join(directory, "request")
        with open(request, "xb") as file:
            file.write(line)
        with contextlib.ExitStack() as stack:
            opened = []
            for path, flags in (
                (os.devnull, os.O_RDONLY),
                (self._said, os.O_WRONLY | os.O_CREAT),
                (request, os.O_RDONLY),
            ):
                opened.append(_programs.high(os.open(path, flags | os.O_CLOEXEC, 0o600)))
                stack.callback(os.close, opened[-1])
            self._answers, ours = os.pipe()
            answers = _programs.high(ours)
            stack.callback(os.close, answers)
            # Not subprocess: that gives descriptors on, but not under other numbers.
            nothing, said, request_fd = opened
            given = (nothing, said, said, request_fd, answers)
            limits = json.dumps(
                {"CPU": max(1, int(deadline - time.monotonic()) * (os.cpu_count() or 1))}
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
                    file_actions=_programs.exactly(given),
                    setsid=True,
                )
            except OSError as error:
                os.close(self._answers)
                raise NoWorker(f"{program}: {error.strerror}") from error

    @property
    def _said(self) -> str:
        return os.path.join(self._directory, "said")

    def events(self, deadline: float) -> Iterator[dict[str, Any]]:
        """Yields what the worker tells, the last of it the result or refusal. Raises TimeoutError
        at the deadline.
        """
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        rest, total = b"", 0
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not poll.poll(min(left, 3600.0) * 1000):
                continue
            part = os.read(self._answers, 1 << 16)
            total += len(part)
            if not part or total > MAX_SAID:
                return
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                # what is no answer leaves the request without one
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict):
                        yield event
                        if "Result" in event or "Refusal" in event:
                            return

    def wait(self, deadline: float) -> int | None:
        """Returns the exit status, None where another part of this process took it. Raises
        TimeoutError at the deadline.
        """
        while not self._reap():
            if time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(0.002)
        return self._status

    def _reap(self) -> bool:
        if not self._gone:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self._pid, -1
            if pid:
                self._gone = True
                self._status = None if status == -1 else _shell_status(status)
        return self._gone

    def end(self) -> None:
        """Ends the worker and all that it started, if it has not ended."""
        os.close(self._answers)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._reap():
                os.kill(self._pid, signal.SIGTERM)  # it takes the rest with it
                with contextlib.suppress(TimeoutError):
                    self.wait(time.monotonic() + GRACE)
            if not self._reap():
                os.killpg(self._pid, signal.SIGKILL)
                with contextlib.suppress(TimeoutError):
                    self.wait(time.monotonic() + GRACE)

    def last_words(self) -> str:
        with contextlib.suppress(OSError), open(self._said, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_WORDS))
            return file.read(LAST_WORDS).decode(errors="replace").strip()
        return ""


def _shell_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return SIGNAL - code if code < 0 else code


def _environment(directory: str) -> dict[str, str]:
    """As the daemon's workers have it, and where this process finds libraries."""
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
