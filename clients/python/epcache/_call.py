"""One request to the daemon, which may take several round trips and connections."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from . import _errors, _wire
from ._artefact import Progress, progress
from ._connection import Connection, Limit, Lost, close_all
from ._connections import Connections
from ._version import __version__

# after this many seconds without a frame, a second connection checks that the daemon is alive
SILENCE = 5.0
SIGN_OF_LIFE = 2.0  # seconds for that check
MAX_LATE = 1000  # progress frames that are read after the deadline; a socket holds fewer

T = TypeVar("T")


class Call(Generic[T]):
    """A request that is retried once if the daemon closes the connection."""

    # seconds to wait for a daemon that has to be started; None: do not start one
    patience: float | None = None

    def __init__(
        self,
        connections: Connections,
        deadline: float,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.connections = connections
        self.deadline = deadline
        self.progress = progress
        self.connect_seconds = 0.0

    def run(self) -> T:
        connection = self.connections.take()
        if connection is not None:
            with contextlib.suppress(Lost):
                return self._with(connection)
            # The idle connection may be one to an earlier daemon process.
        connection = self._dial()
        try:
            return self._with(connection)
        except Lost as error:
            # The daemon may be restarting. Requests are idempotent. One retry only, because this
            # request may have crashed the daemon.
            return self._with(self._dial_again(error))

    def _dial_again(self, lost: Lost) -> Connection:
        until = min(self.deadline, time.monotonic() + self.connections.restart_limit)
        pause = 0.01
        last = False
        while not last:
            # One attempt after the limit, because this process itself may not have run.
            last = time.monotonic() >= until
            with contextlib.suppress(_errors.NoDaemon):
                return self._dial()
            if not last:
                time.sleep(min(pause, max(0.0, until - time.monotonic())))
                pause = min(2 * pause, 0.25)
        raise _errors.NoDaemon(
            "the connection to the daemon was lost during the request, and no daemon answers "
            f"now: {lost.text}"
        ) from lost

    def _dial(self) -> Connection:
        started = time.monotonic()
        connection = self.connections.connect(self.deadline, self.patience)
        self.connect_seconds = time.monotonic() - started
        return connection

    def _with(self, connection: Connection) -> T:
        try:
            result = self._exchange(connection)
        except (Lost, _errors.ProtocolError, _errors.DeadlineExceeded):
            connection.close()
            raise
        except _errors.Error:
            # An Error answer leaves the connection usable.
            self.connections.give_back(connection)
            raise
        except BaseException:
            # An exception of the caller, such as KeyboardInterrupt: closing cancels the request.
            connection.close()
            raise
        self._finish(connection, result)
        return result

    def _finish(self, connection: Connection, result: T) -> None:
        self.connections.give_back(connection)

    def _exchange(self, connection: Connection) -> T:
        raise NotImplementedError

    def _answer(self, connection: Connection) -> tuple[_wire.Message, list[int]]:
        """Returns the next frame that is not Progress. If the daemon is silent for SILENCE seconds,
        checks that it is alive.
        """
        late = 0
        while True:
            if not connection.readable(min(self.deadline - time.monotonic(), SILENCE)):
                self._check_alive(connection)
                continue
            envelope, descriptors = connection.answer(self.deadline)
            if "progress" not in envelope:
                return envelope, descriptors
            close_all(descriptors)
            late += time.monotonic() >= self.deadline
            if late > MAX_LATE:
                raise _errors.DeadlineExceeded(f"{connection.path}: no answer in time")
            if self.progress is not None:
                self.progress(progress(envelope["progress"]))

    def _check_alive(self, connection: Connection) -> None:
        if time.monotonic() >= self.deadline:
            if connection.readable(0.0):
                return
            raise _errors.DeadlineExceeded(f"{connection.path}: no answer in time")
        limit = Limit(self.deadline, SIGN_OF_LIFE)
        try:
            Connection(connection.path, limit, f"python epcache {__version__}").close()
        except _errors.Error as error:
            if connection.readable(0.0):
                return
            raise Lost(f"{connection.path}: the daemon no longer answers: {error.text}") from error


class Question(Call[_wire.Message]):
    """A request without descriptors. `body` and `reply` are the names of fields in Envelope."""

    def __init__(
        self,
        connections: Connections,
        body: str,
        message: _wire.Message,
        reply: str,
        deadline: float,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        super().__init__(connections, deadline, progress)
        self.body = body
        self.message = message
        self.reply = reply

    def _exchange(self, connection: Connection) -> _wire.Message:
        connection.start({self.body: self.message}, (), self.deadline)
        envelope, received = self._answer(connection)
        close_all(received)
        reply: _wire.Message | None = envelope.get(self.reply)
        if reply is None:
            raise _errors.ProtocolError(f"the daemon's answer to {self.body} is unexpected")
        return reply


class Last(Call[T]):
    """A request that belongs to one connection, and is not retried."""

    def on(self, connection: Connection) -> T:
        raise NotImplementedError
