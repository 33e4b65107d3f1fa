"""What happens to the caller's entries and to the machine: as it happens, or afterwards."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from . import _errors, _wire
from ._connection import Connection, Lost, close_all
from ._fields import dataclass

# For the rest of an event that has begun to arrive.
FRAME_LIMIT = 10.0


@dataclass(frozen=True)
class Event:
    """Something that happened. Texts are empty where they do not apply."""

    at: float  # Unix time, seconds
    # "compiled", "failed", "withheld", "damaged", "judged", "rebuilt", "report", "probed",
    # "changed", ...
    kind: str
    request_key: str  # "": of the machine, not of an entry
    build: str  # build key, 64 hex digits
    model: str  # its name
    text: str  # in words
    runtime: str  # directory or library that it is about
    # grows, with gaps where something is not for this user; 0: from before the daemon's start
    sequence: int


def event(message: _wire.Message) -> Event:
    fields = dict(message)
    return Event(at=fields.pop("at_ms") / 1000, **fields)


class Subscription:
    """Events as they happen: iterate over it. Made by Client.subscribe, with a connection of its
    own.

    The iteration ends at the timeout, or with close() from any thread; it raises NoDaemon if the
    daemon ends, and Busy if it is stopped. A slow reader misses the oldest events and gets one of
    kind "missed" instead; one that reads nothing for long is disconnected.
    """

    def __init__(self, connection: Connection, until: float) -> None:
        self._connection = connection
        self._until = until  # of time.monotonic(); may be infinite
        self._reading = threading.Lock()
        self._closed = False
        # The time limit is kept here: it may be none, which the deadline of a request cannot be.
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
        while self._closed or not self._connection.readable(self._until):
            if self._closed or time.monotonic() >= self._until:
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
        if self._connection.pid == os.getpid():  # in a forked child that would end the parent's
            self._connection.shut_down()
        # The reader closes the descriptor, because its number must not be another file's meanwhile.
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
        except (
            Exception
        ):  # the interpreter may be half gone, with the modules that this uses, or this half made
            pass
