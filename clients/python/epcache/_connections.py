"""The connections of a client: how a daemon is found, or started, and what is remembered from one
request to the next.
"""

from __future__ import annotations

import _thread
import os
import time
from collections import OrderedDict

from . import _autostart, _errors
from ._connection import Connection, Lost
from ._request import Runtime
from ._version import __version__

SYSTEM_SOCKET = "/run/epcached/epcached.sock"
SOCKET_VARIABLE = "EPCACHE_SOCKET"

MAX_IDLE = 4  # connections kept for the next request
# For how long they are kept, seconds. A later request says Hello again, in a fraction of a
# millisecond: so a daemon that was stopped since is found out within the limit for a Hello, and not
# after the silence that a compile may take.
MAX_IDLE_AGE = 1.0


class Connections:
    """Connects to the first daemon that answers, and keeps idle connections. May be used by several
    threads at once, and after a fork.
    """

    def __init__(self, socket: str | None, hello_limit: float, restart_limit: float) -> None:
        self.socket = socket  # None: EPCACHE_SOCKET, else the default ones
        self.hello_limit = hello_limit
        self.restart_limit = restart_limit
        self._lock = _thread.allocate_lock()
        self._idle: list[Connection] = []  # guarded by _lock
        # What external data a model refers to, by the graph file's stamp: saves asking twice.
        # Guarded by _lock.
        self._locations: OrderedDict[tuple[int, ...], list[str]] = OrderedDict()
        # Libraries of execution providers, by path, that a daemon wanted to see with those beside
        # them: saves asking twice. Guarded by _lock.
        self._beside: set[str] = set()

    def connect(self, deadline: float, patience: float | None = None) -> Connection:
        """Returns a connection to the first daemon that answers, all of them together within the
        limit for a Hello.

        Where there is none, one is started, unless `patience` is None: the seconds that it may
        take, beyond that limit.
        """
        limit = min(deadline, time.monotonic() + self.hello_limit)
        tried, absent = [], True
        named = self._named()
        for path in [self.socket] if self.socket else default_sockets():
            system = path == SYSTEM_SOCKET
            try:
                return self._reach(path, limit, deadline, bool(patience and not named))
            except (Lost, _errors.DeadlineExceeded) as error:
                tried.append(str(error))
                absent = absent and _autostart.absent(path, error, system)
        if patience is not None and absent and not named and _autostart.switched_on():
            until = min(deadline, limit + patience)
            try:
                if connection := _autostart.connect(
                    lambda path: self._dial(path, max(until, limit)), until
                ):
                    return connection
            except _errors.NoDaemon as error:
                tried.append(error.text)
            # of what is loaded only now, by a process that gave up the rights to read it
            except ImportError as error:
                tried.append(f"no daemon can be started: {error}")
        raise _errors.NoDaemon("no daemon: " + "; ".join(tried))

    def may_start_own(self, patience: float | None) -> bool:
        """Reports whether a daemon of the user's own may be started: no socket was named, and it is
        not switched off.
        """
        return patience is not None and not self._named() and _autostart.switched_on()

    def _named(self) -> str | None:
        return self.socket or os.environ.get(SOCKET_VARIABLE)

    def start_own(self, deadline: float, patience: float) -> Connection | None:
        """Returns a connection to the user's own daemon, for requests that another user's daemon
        refuses; None if this machine can have none.
        """
        until = min(deadline, time.monotonic() + self.hello_limit + patience)
        try:
            return _autostart.connect(lambda path: self._dial(path, until), until)
        except (
            _errors.NoDaemon,
            ImportError,
        ):  # an import fails in a process that gave up the rights to read the module
            return None

    def _reach(self, path: str, limit: float, deadline: float, waits: bool) -> Connection:
        """Returns a connection. A request that waits for a compile also waits for a new, busy
        daemon.
        """
        while True:
            young = _autostart.youth(path) if waits else 0.0
            try:
                return self._dial(path, max(limit, min(deadline, time.monotonic() + young)))
            except _errors.DeadlineExceeded:
                # It may have come between the look and the connection.
                if not waits or young or not _autostart.youth(path):
                    raise

    def _dial(self, path: str, limit: float) -> Connection:
        return Connection(path, limit, f"python epcache {__version__}")

    def close(self) -> None:
        """Closes the idle connections. More can be made afterwards."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __del__(self) -> None:
        try:
            self.close()
        except (
            Exception
        ):  # the interpreter may be half gone, with the modules that this uses, or this half made
            pass

    def take(self) -> Connection | None:
        """Returns an idle connection, None where there is none."""
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                fresh = time.perf_counter() - connection.received_at < MAX_IDLE_AGE
                if fresh and connection.pid == os.getpid():
                    return connection
                # If the parent process uses it, two would read each other's answers. Closing ends
                # it here only.
                connection.close()
        return None

    def give_back(self, connection: Connection) -> None:
        """Keeps a connection for the next request, or closes it."""
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def shown(self, runtime: Runtime | None) -> Runtime | None:
        """Returns the runtime with its libraries shown, where a daemon wanted that before."""
        with self._lock:
            wanted = runtime is not None and any(
                one.path in self._beside for one in runtime.libraries
            )
        return (runtime.showing() or runtime) if runtime is not None and wanted else runtime

    def show(self, runtime: Runtime) -> None:
        """Remembers that a daemon wants to see the files beside the runtime's libraries."""
        with self._lock:
            self._beside.update(one.path for one in runtime.libraries)

    def known_locations(self, stamp: tuple[int, ...]) -> list[str]:
        """Returns the external data that the model with this stamp is known to refer to."""
        with self._lock:
            return self._locations.get(stamp, [])

    def remember(self, stamp: tuple[int, ...], locations: list[str]) -> None:
        with self._lock:
            self._locations[stamp] = locations
            while len(self._locations) > 256:
                self._locations.popitem(last=False)


def default_sockets() -> list[str]:
    """Returns the sockets at which a daemon is looked for, in order. If EPCACHE_SOCKET is set, it
    is the only one.
    """
    if path := os.environ.get(SOCKET_VARIABLE):
        return [path]
    return [own for own in _autostart.user_sockets() if not _autostart.foreign(own)] + [
        SYSTEM_SOCKET
    ]
