"""The client: asks the daemon for compiled models."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import _errors, _wire
from ._connection import Connection, Lost, close_all
from ._model import Model, ModelSource, open_model
from ._request import EPSpec, ExecutionProvider, Runtime, providers
from ._version import __version__

SYSTEM_SOCKET = "/run/epcached/epcached.sock"
SOCKET_VARIABLE = "EPCACHE_SOCKET"

HELLO_LIMIT = 0.05  # an application goes on without a daemon that does not answer by then
SILENCE = 5.0  # after that long without a word it is asked on another connection whether it still lives
SIGN_OF_LIFE = 2.0
MAX_IDLE = 4  # connections kept for the next request


@dataclass(frozen=True)
class Progress:
    """How far a request is. `phase` is one of reading, queued, probing, compiling, checking, storing, verifying."""

    phase: str
    elapsed_seconds: float
    detail: str = ""
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True)
class File:
    """A file of an artefact: name relative to the view, size in bytes, BLAKE3 digest as 64 hex digits."""

    name: str
    size: int
    digest: str


@dataclass
class Artefact:
    """A compiled model, and the lease on it.

    As long as it is open, the daemon keeps the files as they are: keep it open as long as a session that was made
    from it lives. Load `path` (or `view_path`, see there) with exactly these provider and session options.
    """

    outcome: str  # "hit", "compiled", "waited"; "passthrough", "key": without a view
    request_key: str
    build: str
    model_digest: str
    ep: str
    sdk_version: str
    hardware_architecture: str
    compatibility: str
    why: str
    view: str  # absolute path of the view's folder; "" without one
    graph: str  # relative to the view
    files: list[File]
    provider_options: dict[str, dict[str, str]]  # by execution provider
    session_options: dict[str, str]  # session config entries
    graph_optimization_level: str  # "" where it does not matter
    compile_seconds: float
    elapsed_seconds: float  # at the daemon
    record: str  # the request as the daemon understood it, JSON
    runtime: str
    warnings: list[str]
    fd: int | None = None  # descriptor of the view's folder; None without a view, or when closed
    round_trip_seconds: float = 0.0  # from the first byte of the last request frame to the last of its answer
    connect_seconds: float = 0.0
    server: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def path(self) -> str:
        """The graph's path through the descriptor: it needs no rights on the daemon's folders.

        It is good for as long as this is open. Ids in it are never used again, so that caches keyed by path, which
        execution providers have, never mix up two models.
        """
        if self.fd is None:
            raise ValueError("this artefact is closed, or was answered without a view")
        return f"/proc/self/fd/{self.fd}/{self.graph}"

    @property
    def view_path(self) -> str:
        """The graph's path by name, for what cannot be loaded through a descriptor. Not every user can reach it."""
        return str(Path(self.view) / self.graph) if self.view else ""

    def close(self) -> None:
        """Gives up the lease. May be called again."""
        with self._lock:
            descriptor, self.fd = self.fd, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Artefact:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be half gone
            self.close()


class Client:
    """Asks the daemon for compiled models. May be used by several threads at once, and after a fork.

    Nothing is connected before the first request. `socket` is a path; without one EPCACHE_SOCKET is asked, else
    the user's own daemon, then the system's. `timeout` is the limit for one acquire, in seconds. `hello_limit` is how
    long a daemon may take to answer at all. `restart_limit` is how long a daemon that went away during a request may
    take to come back.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        *,
        hello_limit: float = HELLO_LIMIT,
        restart_limit: float = 10.0,
    ) -> None:
        self._socket = os.fspath(socket) if socket is not None else None
        self._timeout = timeout
        self._hello_limit = hello_limit
        self._restart_limit = restart_limit
        self._lock = threading.Lock()
        self._idle: list[Connection] = []  # guarded by _lock
        # What external data a model refers to, by the graph file's stamp: saves asking twice. Guarded by _lock.
        self._locations: OrderedDict[tuple[int, ...], list[str]] = OrderedDict()

    def acquire(
        self,
        model: ModelSource,
        eps: EPSpec | Sequence[EPSpec],
        *,
        session_options: Mapping[str, str] | None = None,
        dims: Mapping[str, int] | None = None,
        dims_by_denotation: Mapping[str, int] | None = None,
        graph_optimization_level: str = "",
        embed: bool = False,
        route: str = "",
        runtime: Runtime | str | None = None,
        on_miss: str = "wait",
        store: str = "",
        strict_ort: bool = False,
        timeout: float | None = None,
        progress: Callable[[Progress], None] | None = None,
        external: Callable[[str], int] | None = None,
    ) -> Artefact:
        """Returns the compiled form of a model, with a lease on it.

        `model` is a path, an open binary file, or the model's bytes. `eps` are execution providers in order of
        preference: "OpenVINOExecutionProvider:CPU", ("QNNExecutionProvider", {"soc_model": "60"}) or
        ExecutionProvider. `dims` fixes free dimensions by name. `runtime` says what the artefact will be loaded
        with, or names its folder; without one it is the daemon's default runtime. `on_miss` is one of wait, fail,
        refresh, bypass, key_only. `store` (shared, user, none) can narrow where the result is kept. `progress` is called on this
        thread. External data is opened here when the daemon asks for it: by its location relative to the model's
        folder, or by `external`, which returns a descriptor that is closed afterwards.

        Raises an epcache.Error: NoDaemon when none answers.
        """
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        request: _wire.Message = {
            "session_options": dict(session_options or {}),
            "free_dimensions": dict(dims or {}),
            "free_dimensions_by_denotation": dict(dims_by_denotation or {}),
            "graph_optimization_level": graph_optimization_level,
            "embed": embed,
            "route": route,
            "on_miss": _on_miss(on_miss),
            "store": store,
            "strict_ort": strict_ort,
        }
        with open_model(model, external) as source:
            where = Runtime(directory=os.path.abspath(runtime)) if isinstance(runtime, str) else runtime
            return _Call(self, source, providers(eps), where, request, deadline, progress).run()

    def close(self) -> None:
        """Closes the idle connections. Artefacts stay good, and the client can be used again."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be half gone, or this half made
            self.close()

    def _connect(self, deadline: float) -> Connection:
        """Returns a connection to the first daemon that answers, all of them together within the limit for a Hello."""
        limit = min(deadline, time.monotonic() + self._hello_limit)
        tried = []
        for path in [self._socket] if self._socket else default_sockets():
            try:
                return Connection(path, limit, f"python epcache {__version__}")
            except (Lost, _errors.DeadlineExceeded) as error:
                tried.append(str(error))
        raise _errors.NoDaemon("no daemon: " + "; ".join(tried))

    def _take(self) -> Connection | None:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if connection.pid == os.getpid():
                    return connection
                # The parent process uses it: two would read each other's answers. Closing ends it here only.
                connection.close()
        return None

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _known_locations(self, stamp: tuple[int, ...]) -> list[str]:
        with self._lock:
            return self._locations.get(stamp, [])

    def _remember(self, stamp: tuple[int, ...], locations: list[str]) -> None:
        with self._lock:
            self._locations[stamp] = locations
            while len(self._locations) > 256:
                self._locations.popitem(last=False)


class _Call:
    """One acquire, over as many connections and rounds as it takes."""

    def __init__(
        self,
        client: Client,
        model: Model,
        eps: list[ExecutionProvider],
        runtime: Runtime | None,
        request: _wire.Message,
        deadline: float,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.client = client
        self.model = model
        self.eps = eps
        self.runtime = runtime
        self.request = request
        self.deadline = deadline
        self.progress = progress
        self.connect_seconds = 0.0

    def run(self) -> Artefact:
        connection = self.client._take()
        if connection is not None:
            with contextlib.suppress(Lost):
                return self._with(connection)
            # An idle connection may have died with an earlier daemon: that says nothing of the one that is there now.
        connection = self._dial()
        try:
            return self._with(connection)
        except Lost as error:
            # The daemon was there and went away: it may be restarting. Asking again does no harm, and only once: it
            # may be this very request that it dies of.
            return self._with(self._dial_again(error))

    def _dial_again(self, lost: Lost) -> Connection:
        until = min(self.deadline, time.monotonic() + self.client._restart_limit)
        pause = 0.01
        while time.monotonic() < until:
            with contextlib.suppress(_errors.NoDaemon):
                return self._dial()
            time.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(2 * pause, 0.25)
        raise _errors.NoDaemon(f"the daemon went away during the request and did not come back: {lost.text}") from lost

    def _dial(self) -> Connection:
        started = time.monotonic()
        connection = self.client._connect(self.deadline)
        self.connect_seconds = time.monotonic() - started
        return connection

    def _with(self, connection: Connection) -> Artefact:
        try:
            artefact = self._rounds(connection)
        except (Lost, _errors.ProtocolError, _errors.DeadlineExceeded):
            connection.close()
            raise
        except _errors.Error:
            # The daemon's own answer: the connection is as good as before.
            self.client._give_back(connection)
            raise
        except BaseException:
            # Of the caller's making, in the middle of a request: closing is what cancels it.
            connection.close()
            raise
        artefact.connect_seconds = self.connect_seconds
        artefact.server = connection.server
        self.client._give_back(connection)
        return artefact

    def _rounds(self, connection: Connection) -> Artefact:
        """Asks, and once more with the external data that the daemon said the model refers to."""
        locations = self.client._known_locations(self.model.stamp)
        for _ in range(3):
            answer = self._ask(connection, locations)
            if isinstance(answer, Artefact):
                return answer
            locations = answer
            self.client._remember(self.model.stamp, locations)
        raise _errors.ProtocolError("the daemon asks for external data again and again")

    def _ask(self, connection: Connection, locations: list[str]) -> Artefact | list[str]:
        with self._opened(locations) as (body, descriptors):
            connection.start({"acquire": body}, descriptors, self.deadline)
            envelope, received = self._answer(connection)
        try:
            if "need" in envelope:
                return _checked_locations(envelope["need"]["locations"])
            reply = envelope.get("acquire_reply")
            if reply is None:
                raise _errors.ProtocolError("the daemon's answer to an Acquire is something else")
            artefact = _artefact(reply, received)
            artefact.round_trip_seconds = connection.received_at - connection.sent_at
            return artefact
        finally:
            close_all(received)

    @contextlib.contextmanager
    def _opened(self, locations: list[str]) -> Iterator[tuple[_wire.Message, list[int]]]:
        """Yields the Acquire and its descriptors; those that were opened for it are closed afterwards."""
        with contextlib.ExitStack() as stack:
            descriptors = [self.model.fd]

            def send(descriptor: int) -> int:
                descriptors.append(descriptor)
                return len(descriptors) - 1

            external = []
            for location in locations:
                descriptor = self.model.open_external(location)
                stack.callback(os.close, descriptor)
                external.append({"location": location, "fd": send(descriptor)})
            body = dict(self.request)
            body["model"] = {"fd": 0, "name": self.model.name, "external": external}
            body["eps"] = [ep.message(send, stack) for ep in self.eps]
            if self.runtime is not None:
                body["runtime"] = self.runtime.message(send, stack)
            yield body, descriptors

    def _answer(self, connection: Connection) -> tuple[_wire.Message, list[int]]:
        """Waits for what is not Progress. A daemon that is silent for long is asked whether it still lives."""
        while True:
            limit = min(self.deadline, time.monotonic() + SILENCE)
            if not connection.readable(limit):
                self._check_alive(connection)
                continue
            envelope, descriptors = connection.answer(self.deadline)
            if "progress" not in envelope:
                return envelope, descriptors
            close_all(descriptors)
            if self.progress is not None:
                self.progress(_progress(envelope["progress"]))

    def _check_alive(self, connection: Connection) -> None:
        if time.monotonic() >= self.deadline:
            raise _errors.DeadlineExceeded(f"{connection.path}: no answer in time")
        limit = min(self.deadline, time.monotonic() + SIGN_OF_LIFE)
        try:
            Connection(connection.path, limit, f"python epcache {__version__}").close()
        except _errors.Error as error:
            raise Lost(f"{connection.path}: the daemon no longer answers: {error.text}") from error


def default_sockets() -> list[str]:
    """Returns where a daemon is looked for, in this order. EPCACHE_SOCKET, where it is set, is meant alone."""
    if path := os.environ.get(SOCKET_VARIABLE):
        return [path]
    own = _user_socket()
    return [own, SYSTEM_SOCKET] if own else [SYSTEM_SOCKET]


def _user_socket() -> str:
    for variable in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        folder = os.environ.get(variable, "")
        if os.path.isabs(folder):
            return os.path.join(folder, "epcached", "epcached.sock")
    home = os.path.expanduser("~")
    return os.path.join(home, ".local", "state", "epcached", "epcached.sock") if os.path.isabs(home) else ""


def _on_miss(name: str) -> int:
    try:
        return _wire.ENUMS["OnMiss"][name.upper()]
    except KeyError:
        known = ", ".join(choice.lower() for choice in _wire.ENUMS["OnMiss"])
        raise ValueError(f"on_miss {name!r}: it is one of {known}") from None


def _progress(message: _wire.Message) -> Progress:
    return Progress(
        phase=message["phase"],
        elapsed_seconds=message["elapsed_ms"] / 1000,
        detail=message["detail"],
        done_bytes=message["done_bytes"],
        total_bytes=message["total_bytes"],
    )


def _checked_locations(locations: list[str]) -> list[str]:
    """A client opens only what lies below the model's folder, whatever the daemon, or the model, asks for."""
    for location in locations:
        if not _clean(location):
            raise _errors.BadModel(f"external data {location!r} does not lie below the model's folder")
    if len(locations) > 4096 - 64:
        raise _errors.BadModel(f"the model refers to {len(locations)} files of external data: too many")
    return locations


def _clean(path: str) -> bool:
    parts = path.split("/")
    return "\0" not in path and all(part not in ("", ".", "..") for part in parts)


def _artefact(reply: _wire.Message, received: list[int]) -> Artefact:
    """Turns a reply into an artefact, which takes its descriptor out of `received`; the others stay there."""
    if "fd" in reply and reply["fd"] >= len(received):
        raise _errors.ProtocolError(f"the view is descriptor {reply['fd']} of {len(received)}")
    if (reply["view"] or "fd" in reply) and not _clean(reply["graph"]):
        raise _errors.ProtocolError(f"the graph {reply['graph']!r} does not lie in the view")
    fd = None
    if "fd" in reply:
        if not stat.S_ISDIR(os.fstat(received[reply["fd"]]).st_mode):
            raise _errors.ProtocolError("the descriptor of the view is not one of a folder")
        fd = received.pop(reply["fd"])
    plain = {name: reply[name] for name in _PLAIN}
    return Artefact(
        **plain,
        files=[File(**f) for f in reply["files"]],
        provider_options={ep: options["entries"] for ep, options in reply["provider_options"].items()},
        fd=fd,
    )


# Fields that an Artefact takes from the reply as they are.
_PLAIN = (
    "outcome request_key build model_digest ep sdk_version hardware_architecture compatibility why view graph "
    "session_options graph_optimization_level compile_seconds elapsed_seconds record runtime warnings"
).split()
