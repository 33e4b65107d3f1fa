"""A fake daemon that a test scripts: it sends any frame, half a frame, or nothing."""

from __future__ import annotations

import array
import contextlib
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from epcache import _wire

HELLO = {"request": 0, "hello_reply": {"version": 1, "server": "fake", "uid": 0, "scope": "uid:0"}}


class Peer:
    """The daemon's end of one connection. It closes received descriptors at its end."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.received: list[int] = []

    def read(self) -> dict[str, Any]:
        """Returns the next envelope; `received` gets its descriptors. Raises EOFError at end."""
        data, ancillary, _, _ = self.socket.recvmsg(4, socket.CMSG_SPACE(64 * 4))
        for _, _, numbers in ancillary:
            self.received.extend(array.array("i", numbers))
        (length,) = struct.unpack(
            "<I", data + self._exactly(4 - len(data)) if data else self._exactly(4)
        )
        return _wire.decode("Envelope", self._exactly(length))

    def hello(self) -> None:
        assert "hello" in self.read()
        self.send(HELLO)

    def acquire(self) -> dict[str, Any]:
        """Returns the next Acquire's envelope. Descriptors of Attach frames before it are in
        `received`.
        """
        while True:
            envelope = self.read()
            if "acquire" in envelope:
                return envelope
            assert "attach" in envelope

    def send(self, envelope: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        envelope = {"descriptors": len(descriptors), **envelope}
        self.raw(frame(envelope), descriptors)

    def raw(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        ancillary = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            if descriptors
            else []
        )
        rest = data[self.socket.sendmsg([data], ancillary) :]
        if rest:  # to send nothing is an error if the client has closed the connection
            self.socket.sendall(rest)

    def wait_for_end(self) -> None:
        """Returns when the client has closed its end."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.read()

    def close(self) -> None:
        self.socket.close()
        while self.received:
            os.close(self.received.pop())

    def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = self.socket.recv(length - len(data))
            if not part:
                raise EOFError
            data += part
        return data


def frame(envelope: dict[str, Any]) -> bytes:
    data = _wire.encode("Envelope", envelope)
    return struct.pack("<I", len(data)) + data


Script = Callable[[Peer], None]


class FakeDaemon:
    """Listens on `path` and runs a script for each connection: the n-th one for the n-th
    connection, the last one for all later ones.
    """

    def __init__(self, *scripts: Script) -> None:
        # Not pytest's directory, because its path is too long for a socket.
        self.directory = tempfile.mkdtemp(prefix="fake")
        self.path = os.path.join(self.directory, "s")
        self.scripts = scripts
        self.connections = 0
        self.failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._peers: list[Peer] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._start(self._accept)

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            script = self.scripts[min(self.connections, len(self.scripts) - 1)]
            self.connections += 1
            peer = Peer(connection)
            self._peers.append(peer)
            self._start(lambda peer=peer, script=script: self._run(peer, script))

    def _run(self, peer: Peer, script: Script) -> None:
        try:
            script(peer)
        except (EOFError, OSError):
            pass  # the client has closed the connection: the test checks its error
        except BaseException as error:
            self.failures.append(error)
        finally:
            peer.close()

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + 60
        for thread in self._threads:
            thread.join(max(0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a script of the fake daemon hangs"
        shutil.rmtree(self.directory)
        assert not self.failures, self.failures
