"""One connection to the daemon: frames, their descriptors, and deadlines.

A frame is read with its exact length, header first, so that no read gets bytes or descriptors of
the next frame. Descriptors are accepted only with the first byte of a frame, as the protocol
requires; the kernel closes those that come with any other byte.
"""

from __future__ import annotations

import array
import contextlib
import errno
import math
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from . import _errors, _wire

PROTOCOL_VERSION = 1
MAX_FRAME = 1 << 20
MAX_DESCRIPTORS = 64  # a frame
MAX_POLL = 86_400.0  # seconds; poll() counts milliseconds in 31 bits
# Seconds for the rest of a frame, after its first byte was sent or received.
FRAME_LIMIT = 2.0
CONNECT_PAUSE = 0.002
STUCK = f"the daemon stopped in the middle of a frame, for more than {FRAME_LIMIT:g} s"


class Lost(_errors.NoDaemon):
    """The connection ended, or timed out. A new connection may work."""


class Limit:
    """A limit for waiting: `seconds` in all, and not beyond `deadline`, of time.monotonic().

    The seconds count only while poll() waits, because a thread of a busy process may not run for
    long, which says nothing about the daemon. Reads and writes are tried before each wait, so that
    an answer that has come is read after either limit.
    """

    def __init__(self, deadline: float, seconds: float = math.inf) -> None:
        self.deadline = deadline
        self.seconds = seconds

    def left(self) -> float:
        return max(0.0, min(self.seconds, self.deadline - time.monotonic()))


class Connection:
    """A connection after its Hello. It carries one request at a time, and has to be closed after an
    exception other than an Error answer.

    Deadlines are times of time.monotonic().
    """

    def __init__(self, path: str, limit: Limit, name: str) -> None:
        self.path = path
        self.pid = os.getpid()
        self.sent_at = self.received_at = (
            0.0  # of the last request's first byte, and the last frame's last; perf_counter()
        )
        self._request = 0
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        try:
            self._connect(limit)
            self._hello(limit, name)
        except BaseException:
            self.close()
            raise

    def _connect(self, limit: Limit) -> None:
        while True:
            try:
                self._socket.connect(self.path)
                return
            except BlockingIOError as error:  # the backlog is full, which poll() does not show
                pause = min(CONNECT_PAUSE, limit.left())
                if pause <= 0:
                    raise Lost(f"connect to {self.path}: {_reason(error)}") from error
                time.sleep(pause)
                limit.seconds -= pause
            except OSError as error:
                raise Lost(f"connect to {self.path}: {_reason(error)}") from error

    def _hello(self, limit: Limit, name: str) -> None:
        hello = {"hello": {"version": PROTOCOL_VERSION, "client": name}}
        self._send(_frame(0, hello, 0), (), limit)
        answer, descriptors = self._receive(limit)
        close_all(descriptors)
        _raise_error(answer)
        reply = answer.get("hello_reply")
        if reply is None or answer["request"] != 0:
            raise _errors.ProtocolError(f"{self.path}: the first answer is not a Hello")
        if reply["version"] != PROTOCOL_VERSION:
            version = reply["version"]
            raise _errors.VersionMismatch(
                f"{self.path}: the daemon has protocol version {version}, this client has "
                f"{PROTOCOL_VERSION}"
            )
        self.server: str = reply["server"]
        self.scope: str = reply["scope"]

    def start(self, body: dict[str, Any], descriptors: Sequence[int], deadline: float) -> None:
        """Sends a request under a new number. Descriptors that do not fit into its frame are sent
        before it in Attach frames.
        """
        self._request += 1
        body = {"deadline_ms": max(1, math.ceil((deadline - time.monotonic()) * 1000)), **body}
        excess = max(0, len(descriptors) - MAX_DESCRIPTORS)
        # Encoded before anything is sent, so that a request that is too large changes nothing.
        frame = _frame(self._request, body, len(descriptors) - excess)
        self.sent_at = time.perf_counter()
        limit = Limit(deadline)
        for at in range(0, excess, MAX_DESCRIPTORS):
            part = descriptors[at : min(at + MAX_DESCRIPTORS, excess)]
            self._send(_frame(self._request, {"attach": {}}, len(part)), part, limit)
        self._send(frame, descriptors[excess:], limit)

    def readable(self, seconds: float) -> bool:
        """Waits until data arrives or the connection ends. Returns False if neither happens within
        `seconds`, or a day. Then it looks again without waiting, because data may have come while
        this thread could not run.
        """
        return self._poll(select.POLLIN, seconds) or self._poll(select.POLLIN, 0.0)

    def _poll(self, event: int, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(max(0, math.ceil(min(seconds, MAX_POLL) * 1000))))

    def answer(self, deadline: float) -> tuple[_wire.Message, list[int]]:
        """Returns the next frame of the current request and its descriptors, which the caller has
        to close. Raises the error of an Error frame.
        """
        while True:
            envelope, descriptors = self._receive(Limit(deadline))
            # A frame with number 0 has the reason why the daemon closes the connection; frames with
            # other numbers answer cancelled requests.
            if envelope["request"] in (0, self._request):
                break
            close_all(descriptors)
        try:
            _raise_error(envelope)
            if envelope["request"] == 0:
                raise _errors.ProtocolError(f"{self.path}: a frame has no request number")
        except BaseException:
            close_all(descriptors)
            raise
        return envelope, descriptors

    def shut_down(self) -> None:
        """Ends the connection, so that a blocked reader returns, but keeps the descriptor open."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection; the daemon cancels its request. May be called again."""
        self._socket.close()

    def _send(self, data: bytes, descriptors: Sequence[int], limit: Limit) -> None:
        frame = memoryview(data)
        ancillary = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            if descriptors
            else []
        )
        whole = Limit(math.inf, FRAME_LIMIT)
        try:
            while frame:
                try:
                    sent = self._socket.sendmsg([frame], ancillary)
                except BlockingIOError:
                    self._wait(select.POLLOUT, limit, whole)
                    continue
                frame, ancillary = frame[sent:], []
        except (BrokenPipeError, ConnectionResetError) as error:
            self._raise_last_word()
            raise self._lost("send", error) from error
        except OSError as error:
            raise self._lost("send", error) from error

    def _raise_last_word(self) -> None:
        """Raises the error that the daemon sent before it closed the connection, if it can still be
        read.
        """
        with contextlib.suppress(Lost, _errors.DeadlineExceeded, _errors.ProtocolError):
            envelope, descriptors = self._receive(Limit(math.inf, 0.1))
            close_all(descriptors)
            _raise_error(envelope)

    def _receive(self, limit: Limit) -> tuple[_wire.Message, list[int]]:
        begun, descriptors = self._begin(limit)
        whole = Limit(math.inf, FRAME_LIMIT)
        try:
            header = begun + self._exactly(4 - len(begun), limit, whole)
            (length,) = struct.unpack("<I", header)
            if not 1 <= length <= MAX_FRAME:
                raise _errors.ProtocolError(
                    f"{self.path}: the daemon sent a frame of {length} bytes, outside 1 to "
                    f"{MAX_FRAME}"
                )
            data = self._exactly(length, limit, whole)
            self.received_at = time.perf_counter()
            envelope = self._decode(data)
            if envelope["descriptors"] != len(descriptors):
                wanted, got = envelope["descriptors"], len(descriptors)
                raise _errors.ProtocolError(
                    f"{self.path}: the daemon sent {got} descriptors instead of {wanted}"
                )
        except BaseException:
            close_all(descriptors)
            raise
        return envelope, descriptors

    def _begin(self, limit: Limit) -> tuple[bytes, list[int]]:
        """Returns the first bytes of a frame, at most its length, and all of its descriptors."""
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
        while True:
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(4, room, socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:
                self._wait(select.POLLIN, limit)
            except OSError as error:
                raise self._lost("receive", error) from error
        descriptors = _descriptors(ancillary)
        try:
            if flags & socket.MSG_CTRUNC:
                raise _errors.ProtocolError(
                    f"{self.path}: the daemon sent too many descriptors, or this process has too "
                    "many open files"
                )
            if not data:
                raise Lost(f"{self.path}: the daemon closed the connection")
            return data, descriptors
        except BaseException:
            close_all(descriptors)
            raise

    def _exactly(self, length: int, limit: Limit, whole: Limit) -> bytes:
        data = bytearray()
        while len(data) < length:
            try:
                part = self._socket.recv(length - len(data))
            except BlockingIOError:
                self._wait(select.POLLIN, limit, whole)
                continue
            except OSError as error:
                raise self._lost("receive", error) from error
            if not part:
                raise Lost(f"{self.path}: the daemon closed the connection inside a frame")
            data += part
        return bytes(data)

    def _decode(self, data: bytes) -> _wire.Message:
        try:
            return _wire.decode("Envelope", data)
        except _wire.WireError as error:
            raise _errors.ProtocolError(f"{self.path}: {error}") from error

    def _wait(self, event: int, limit: Limit, whole: Limit | None = None) -> None:
        """Waits until the socket is ready, after it was not; `whole` is the limit of a frame that
        has begun. Raises DeadlineExceeded or Lost if a limit is reached.
        """
        limits = (limit,) if whole is None else (limit, whole)
        seconds = min(MAX_POLL, *(one.left() for one in limits))
        started = time.monotonic()
        ready = self._poll(event, seconds) if seconds > 0 else False
        waited = min(seconds, time.monotonic() - started) if ready else seconds
        for one in limits:
            one.seconds -= waited
        if ready or self._poll(event, 0.0):
            return
        if limit.left() <= 0:
            raise _errors.DeadlineExceeded(f"{self.path}: no answer in time")
        if whole is not None and whole.left() <= 0:
            raise Lost(f"{self.path}: {STUCK}") from TimeoutError()

    def _lost(self, what: str, error: OSError) -> _errors.Error:
        return Lost(f"{self.path}: {what}: {_reason(error)}")


def _frame(request: int, body: dict[str, Any], descriptors: int) -> bytes:
    try:
        message = {"request": request, "descriptors": descriptors, **body}
        envelope = _wire.encode("Envelope", message)
    except UnicodeEncodeError as error:
        raise _errors.BadRequest(
            f"the request has text that is not UTF-8: {error.object!r}"
        ) from error
    if len(envelope) > MAX_FRAME:
        raise _errors.BadRequest(
            f"the request has {len(envelope)} bytes, more than the limit of {MAX_FRAME}"
        )
    return struct.pack("<I", len(envelope)) + envelope


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        # close() releases the descriptor even if it reports an error.
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            found.extend(numbers)
    return found


def _raise_error(envelope: _wire.Message) -> None:
    error = envelope.get("error")
    if error is not None:
        raise _errors.from_wire(error["class"], error["text"], error["hint"], error["facts"])


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError) or error.errno == errno.EAGAIN:
        return "no answer in time"
    return error.strerror or str(error)
