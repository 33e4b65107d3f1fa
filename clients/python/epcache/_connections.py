"""The connections of a client. Finds a daemon or starts one, keeps idle connections, and caches
facts between requests.
"""

from __future__ import annotations

import _thread
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable

from . import _autostart, _errors
from ._connection import Connection, Limit, Lost
from ._request import Runtime
from ._version import __version__

SYSTEM_SOCKET = "/run/epcached/epcached.sock"
SOCKET_VARIABLE = "EPCACHE_SOCKET"

MAX_IDLE = 4  # connections kept for the next request
# Seconds for which they are kept. A later request connects again, which takes less than a
# millisecond, so that a suspended daemon is noticed within hello_limit and not after SILENCE.
MAX_IDLE_AGE = 1.0
# Seconds for which a daemon that answered counts as alive. It may take as long to answer again,
# because the threads of one application may leave it no processor for longer than hello_limit.
ALIVE_SECONDS = 1.0


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
        # When a daemon last answered, by its socket, of time.monotonic().
        self._heard: dict[str, float] = {}
        # The external data of a model, by the graph file's stamp, to send it with the first
        # request. Guarded by _lock.
        self._locations: OrderedDict[tuple[int, ...], list[str]] = OrderedDict()
        # Paths of libraries. The daemon asked for their neighbours, which the first request sends
        # along. Guarded by _lock.
        self._beside: set[str] = set()

    def connect(self, deadline: float, patience: float | None = None) -> Connection:
        """Returns a connection to the first daemon that answers within hello_limit, which is for
        all sockets together.

        If there is no daemon, one is started, unless `patience` is None: the seconds that the start
        may take beyond hello_limit. Raises NoDaemon with all reasons.
        """
        limit = Limit(deadline, self.hello_limit)
        tried, absent = [], True
        named = self._named()
        for path in [self.socket] if self.socket else default_sockets():
            system = path == SYSTEM_SOCKET
            try:
                return self._reach(path, limit, bool(patience and not named))
            except (Lost, _errors.DeadlineExceeded) as error:
                tried.append(str(error))
                absent = absent and _autostart.is_absent(path, error, system)
        if patience is not None and absent and not named and _autostart.enabled():
            until = min(deadline, time.monotonic() + limit.seconds + patience)
            try:
                if connection := _autostart.connect(self._dialer(until), until):
                    return connection
            except _errors.NoDaemon as error:
                tried.append(error.text)
            # a process that dropped privileges may not be able to read a module imported this late
            except ImportError as error:
                tried.append(f"cannot start a daemon: {error}")
        raise _errors.NoDaemon("no daemon: " + "; ".join(tried))

    def may_start_user_daemon(self, patience: float | None) -> bool:
        """Whether the user's own daemon may be started: no socket was named, and autostart is not
        disabled.
        """
        return patience is not None and not self._named() and _autostart.enabled()

    def _named(self) -> str | None:
        return self.socket or os.environ.get(SOCKET_VARIABLE)

    def start_user_daemon(self, deadline: float, patience: float) -> Connection | None:
        """Returns a connection to the user's own daemon, for requests that the system daemon cannot
        serve; None if it cannot be started.
        """
        until = min(deadline, time.monotonic() + self.hello_limit + patience)
        try:
            return _autostart.connect(self._dialer(until), until)
        except (_errors.NoDaemon, ImportError):  # the latter after dropping privileges
            return None

    def _reach(self, path: str, limit: Limit, waits: bool) -> Connection:
        """Returns a connection. A request that `waits` for a compile has a longer timeout for a new
        daemon, which may be slow to answer, and each request for one that answered just now.
        """
        while True:
            extra = self._extra_seconds(path, waits)
            try:
                longer = extra > limit.seconds
                return self._dial(path, Limit(limit.deadline, extra) if longer else limit)
            except _errors.DeadlineExceeded:
                # The daemon may have been started, or have answered others, after the check.
                if extra or not self._extra_seconds(path, waits):
                    raise

    def _extra_seconds(self, path: str, waits: bool) -> float:
        heard = time.monotonic() - self._heard.get(path, -math.inf) < ALIVE_SECONDS
        new = _autostart.new_daemon_seconds(path) if waits else 0.0
        return max(new, ALIVE_SECONDS if heard else 0.0)

    def _dialer(self, until: float) -> Callable[[str], Connection]:
        return lambda path: self._dial(path, Limit(until))

    def _dial(self, path: str, limit: Limit) -> Connection:
        connection = Connection(path, limit, f"python epcache {__version__}")
        self._heard[path] = time.monotonic()
        return connection

    def close(self) -> None:
        """Closes the idle connections. More can be made afterwards."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # at interpreter exit, or after a failed __init__
            pass

    def take(self) -> Connection | None:
        """Returns an idle connection, None if there is none."""
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                fresh = time.perf_counter() - connection.received_at < MAX_IDLE_AGE
                if fresh and connection.pid == os.getpid():
                    return connection
                # After a fork the parent process uses it: close this process's descriptor only.
                connection.close()
        return None

    def give_back(self, connection: Connection) -> None:
        """Keeps a connection for the next request, or closes it."""
        self._heard[connection.path] = time.monotonic()
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def shown(self, runtime: Runtime | None) -> Runtime | None:
        """Returns the runtime; with neighbouring libraries if the daemon asked for them before."""
        with self._lock:
            wanted = runtime is not None and any(
                one.path in self._beside for one in runtime.libraries
            )
        return (runtime.with_neighbours() or runtime) if runtime is not None and wanted else runtime

    def show(self, runtime: Runtime) -> None:
        """Remembers that the daemon asks for the neighbours of the runtime's libraries."""
        with self._lock:
            self._beside.update(one.path for one in runtime.libraries)

    def known_locations(self, stamp: tuple[int, ...]) -> list[str]:
        """Returns the locations of the model's external data, if remembered."""
        with self._lock:
            return self._locations.get(stamp, [])

    def remember(self, stamp: tuple[int, ...], locations: list[str]) -> None:
        with self._lock:
            self._locations[stamp] = locations
            while len(self._locations) > 256:
                self._locations.popitem(last=False)


def default_sockets() -> list[str]:
    """Returns the sockets that a client tries, in order. If EPCACHE_SOCKET is set, it is the only
    one.
    """
    if path := os.environ.get(SOCKET_VARIABLE):
        return [path]
    return [own for own in _autostart.user_sockets() if not _autostart.is_foreign(own)] + [
        SYSTEM_SOCKET
    ]
