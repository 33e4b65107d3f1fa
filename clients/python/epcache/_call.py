"""One request to the daemon, over as many connections and rounds as it takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from . import _errors, _wire
from ._artefact import Progress, progress
from ._connection import Connection, Lost, close_all
from ._connections import Connections
from ._version import __version__

# after that long without a word it is asked on another connection whether it still lives
SILENCE = 5.0
SIGN_OF_LIFE = 2.0

T = TypeVar("T")


class Call(Generic[T]):
    """A request that may be sent again when the daemon goes away."""

    # for a daemon that has to be started, in seconds; None: it is not worth one
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
            # An idle connection may have died with an earlier daemon: that says nothing of the one
            # that is there now.
        connection = self._dial()
        try:
            return self._with(connection)
        except Lost as error:
            # The daemon was there and went away: it may be restarting. Asking again does no harm,
            # and only once: it may be this very request that it dies of.
            return self._with(self._dial_again(error))

    def _dial_again(self, lost: Lost) -> Connection:
        until = min(self.deadline, time.monotonic() + self.connections.restart_limit)
        pause = 0.01
        tried = self.connections.restart_limit <= 0
        # once in any case: this process itself may have been held up
        while not tried or time.monotonic() < until:
            tried = True
            with contextlib.suppress(_errors.NoDaemon):
                return self._dial()
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
            result = self._rounds(connection)
        except (Lost, _errors.ProtocolError, _errors.DeadlineExceeded):
            connection.close()
            raise
        except _errors.Error:
            # The daemon's own answer: the connection is as good as before.
            self.connections.give_back(connection)
            raise
        except BaseException:
            # Of the caller's making, in the middle of a request: closing is what cancels it.
            connection.close()
            raise
        self._done(connection, result)
        return result

    def _done(self, connection: Connection, result: T) -> None:
        self.connections.give_back(connection)

    def _rounds(self, connection: Connection) -> T:
        raise NotImplementedError

    def _answer(self, connection: Connection) -> tuple[_wire.Message, list[int]]:
        """Waits for what is not Progress. A daemon that is silent for long is asked whether it
        still lives.
        """
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
                self.progress(progress(envelope["progress"]))

    def _check_alive(self, connection: Connection) -> None:
        if time.monotonic() >= self.deadline:
            raise _errors.DeadlineExceeded(f"{connection.path}: no answer in time")
        limit = min(self.deadline, time.monotonic() + SIGN_OF_LIFE)
        try:
            Connection(connection.path, limit, f"python epcache {__version__}").close()
        except _errors.Error as error:
            raise Lost(f"{connection.path}: the daemon no longer answers: {error.text}") from error


class Question(Call[_wire.Message]):
    """A request without descriptors, by the names of its body and of its answer's."""

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

    def _rounds(self, connection: Connection) -> _wire.Message:
        connection.start({self.body: self.message}, (), self.deadline)
        envelope, received = self._answer(connection)
        close_all(received)
        reply: _wire.Message | None = envelope.get(self.reply)
        if reply is None:
            raise _errors.ProtocolError(f"the daemon's answer to {self.body} is unexpected")
        return reply


class Last(Call[T]):
    """A request that can be made on one connection only, and not twice."""

    def on(self, connection: Connection) -> T:
        raise NotImplementedError
