"""Events of the user's models and of the machine: past ones and a subscription to future ones."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from . import _errors, _wire
from ._connection import Connection, Lost, close_all
from ._fields import dataclass

# Seconds for the rest of a frame after its first byte.
FRAME_LIMIT = 10.0


@dataclass(frozen=True)
class Event:
    """Something that happened. Texts are empty where they do not apply."""

    at: float  # Unix time, seconds
    # "compiled", "failed", "withheld", "damaged", "judged", "rebuilt", "report", "probed",
    # "changed", ...
    kind: str
    request_key: str  # "" for an event of the machine
    build: str  # build key, 64 hex digits
    model: str  # its name
    text: str  # in words
    runtime: str  # directory or library that the event is about
    # increases, with gaps for events of other users; 0: from before the daemon's start
    sequence: int


def event(message: _wire.Message) -> Event:
    fields = dict(message)
    return Event(at=fields.pop("at_ms") / 1000, **fields)


class Subscription:
    """An iterator over future events, with its own connection. Made by Client.subscribe.

    The iteration ends at the timeout, or with close() from any thread; it raises NoDaemon if the
    daemon crashes, and Busy if it shuts down. For a slow reader the oldest events are replaced by
    one of kind "missed"; a reader that reads nothing for long is disconnected.
    """

    def __init__(self, connection: Connection, until: float) -> None:
        self._connection = connection
        self._until = until  # of time.monotonic(); may be infinite
        self._reading = threading.Lock()
        self._closed = False
        # No deadline in the request: it cannot express infinity, so the timeout is kept here.
        connection.start({"subscribe": {}, "deadline_ms": 0}, (), time.monotonic() + FRAME_LIMIT)

    def __iter__(self) -> Subscription:
        return self

    def __next__(self) -> Event:
        try:
            with self._reading:
                return self._next()
        except BaseException:
            self.close()
            raise
        finally:
            if self._closed:
                self._connection.close()

    def _next(self) -> Event:
        while self._closed or not self._connection.readable(self._until - time.monotonic()):
            if self._closed or time.monotonic() >= self._until:
                if not self._closed and self._connection.readable(0.0):
                    break  # it came while this thread could not run
                raise StopIteration
        try:
            envelope, descriptors = self._connection.answer(time.monotonic() + FRAME_LIMIT)
        except Lost:
            if self._closed:
                raise StopIteration from None
            raise
        close_all(descriptors)
        message = envelope.get("event")
        if message is None:
            raise _errors.ProtocolError("the daemon's answer to a Subscribe is unexpected")
        return event(message)

    def close(self) -> None:
        """Ends the subscription, and an iteration in another thread. May be called again."""
        self._closed = True
        if self._connection.pid == os.getpid():  # a forked child would end the parent's
            self._connection.shut_down()
        # A blocked reader closes the descriptor itself, because its number must not be reused while
        # the reader uses it.
        if self._reading.acquire(blocking=False):
            self._connection.close()
            self._reading.release()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # at interpreter exit, or after a failed __init__
            pass
