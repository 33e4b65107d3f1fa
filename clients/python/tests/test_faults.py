"""The client against a daemon that is slow, suspended, stopped, or violates the protocol. Each case
raises an error of this package in bounded time, and leaves no descriptor open.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import epcache
import pytest
from descriptors import open_descriptors
from epcache import _connection, _call, _connections
from epcache._connection import Connection
from fake_daemon import HELLO, FakeDaemon, Peer, frame
from test_client import REPLY, answer, connect, hits

pytestmark = pytest.mark.usefixtures("no_leak")


class Waits:
    """Fails if the client's timeouts and pauses add up to more than the limit. Measured are the
    timeouts that the client sets, because elapsed time depends on the machine.
    """

    def __init__(self, at_most: float) -> None:
        self.at_most = at_most
        self.waited = 0.0
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        poll, sleep = Connection._poll, time.sleep

        def polling(connection: Connection, event: int, seconds: float) -> bool:
            came = poll(connection, event, seconds)
            self.waited += 0.0 if came else max(0.0, seconds)
            return came

        def pausing(seconds: float) -> None:
            if threading.get_ident() == self._thread:
                self.waited += seconds
            sleep(seconds)

        self._patched = contextlib.ExitStack()
        self._patched.enter_context(mock.patch.object(Connection, "_poll", polling))
        self._patched.enter_context(mock.patch.object(time, "sleep", pausing))

    def __exit__(self, kind: object, *_: object) -> None:
        self._patched.close()
        assert kind is not None or self.waited <= self.at_most


# Without a daemon, or with one that does not answer, an application continues after 50 ms. The
# margin is for a repeated request.
AT_ONCE = 1.0


def test_no_socket_file(model: str, tmp_path: Path) -> None:
    with (
        Waits(AT_ONCE),
        pytest.raises(epcache.NoDaemon, match="No such file"),
        epcache.Client(tmp_path / "s") as client,
    ):
        client.acquire(model, "E")


def test_socket_without_a_listener(model: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))
    with (
        Waits(AT_ONCE),
        pytest.raises(epcache.NoDaemon, match="refused"),
        epcache.Client(path) as client,
    ):
        client.acquire(model, "E")


def test_no_socket_at_all(model: str) -> None:
    with (
        Waits(AT_ONCE),
        pytest.raises(epcache.NoDaemon, match="refused"),
        epcache.Client(model) as client,
    ):
        client.acquire(model, "E")


def test_path_too_long_for_a_socket(model: str) -> None:
    with pytest.raises(epcache.NoDaemon), epcache.Client("/" + "x" * 200) as client:
        client.acquire(model, "E")


def test_suspended_daemon_is_a_timeout(model: str, tmp_path: Path) -> None:
    """The kernel still accepts connections for a suspended daemon."""
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(tmp_path / "s"))
        stopped.listen(1)
        with epcache.Client(tmp_path / "s") as client:
            for _ in range(4):  # the second connection fills the backlog
                with Waits(AT_ONCE), pytest.raises(epcache.NoDaemon, match="no answer in time"):
                    client.acquire(model, "E")


def test_slow_hello(model: str, view: Path) -> None:
    def script(peer: Peer) -> None:
        peer.read()
        time.sleep(0.5)
        peer.send(HELLO)

    with FakeDaemon(script) as daemon, epcache.Client(daemon.path) as client:
        with Waits(AT_ONCE), pytest.raises(epcache.NoDaemon, match="no answer in time"):
            client.acquire(model, "E")


def pause_after(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float) -> None:
    """Has this process not run for a while after each call of that method of Connection."""
    plain = getattr(Connection, name)

    def pausing(*arguments: object) -> object:
        result = plain(*arguments)
        time.sleep(seconds)
        return result

    monkeypatch.setattr(Connection, name, pausing)


@pytest.mark.parametrize("step", ["_connect", "_send", "_begin"])
def test_time_in_which_the_client_does_not_run_is_not_the_daemons(
    monkeypatch: pytest.MonkeyPatch, model: str, view: Path, step: str
) -> None:
    # Sessions use this limit. The daemon's script, in this process, needs far less.
    monkeypatch.setattr(_connection, "FRAME_LIMIT", 0.05)
    pause_after(monkeypatch, step, 0.2)
    with FakeDaemon(hits(view)) as daemon, epcache.Client(daemon.path) as client:
        assert client.acquire(model, "E").outcome == "hit"


def test_answer_that_came_before_the_deadline_is_read_after_it(
    monkeypatch: pytest.MonkeyPatch, model: str, view: Path
) -> None:
    pause_after(monkeypatch, "start", 0.6)
    with FakeDaemon(hits(view)) as daemon, connect(daemon) as client:
        client.acquire(model, "E", timeout=0.3).close()


def test_progress_after_the_deadline_is_bounded(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        while True:
            peer.send({"request": request["request"], "progress": {"phase": "compiling"}})

    with FakeDaemon(script) as daemon, connect(daemon) as client:
        with pytest.raises(epcache.DeadlineExceeded):
            client.acquire(model, "E", timeout=0.3)


def test_hello_limit_is_for_all_daemons_together(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    def silent(peer: Peer) -> None:
        peer.wait_for_end()

    with FakeDaemon(silent) as one, FakeDaemon(silent) as two:
        monkeypatch.setattr(_connections, "default_sockets", lambda: [one.path, two.path] * 20)
        with epcache.Client() as client, Waits(AT_ONCE), pytest.raises(epcache.NoDaemon):
            client.acquire(model, "E")


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        pytest.param(
            {"request": 0, "hello_reply": {"version": 2}},
            epcache.VersionMismatch,
            id="another version",
        ),
        pytest.param(
            {"request": 0, "error": {"class": 4, "text": "full"}}, epcache.Busy, id="refused"
        ),
        pytest.param(
            {"request": 1, "hello_reply": {"version": 1}},
            epcache.ProtocolError,
            id="under a request number",
        ),
        pytest.param({"request": 0, "progress": {}}, epcache.ProtocolError, id="something else"),
        pytest.param({"request": 0}, epcache.ProtocolError, id="nothing"),
    ],
)
def test_invalid_hello_is_an_error(model: str, first: dict, kind: type[Exception]) -> None:
    def script(peer: Peer) -> None:
        peer.read()
        peer.send(first)
        peer.wait_for_end()

    with FakeDaemon(script) as daemon, connect(daemon) as client, pytest.raises(kind):
        client.acquire(model, "E")


def test_deadline_passes_while_the_daemon_works(model: str) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        for _ in range(100):
            peer.send({"request": request["request"], "progress": {"phase": "compiling"}})
            time.sleep(0.05)

    with FakeDaemon(script) as daemon, connect(daemon) as client:
        with Waits(2), pytest.raises(epcache.DeadlineExceeded):
            client.acquire(model, "E", timeout=0.3)


def test_silent_daemon_is_waited_for_while_it_is_alive(
    monkeypatch: pytest.MonkeyPatch, model: str, view: Path
) -> None:
    monkeypatch.setattr(_call, "SILENCE", 0.1)
    monkeypatch.setattr(_call, "SIGN_OF_LIFE", 60.0)

    def slow(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        while daemon.connections < 2:  # the client checks on a second connection that it is alive
            time.sleep(0.01)
        answer(peer, request, view)

    def alive(peer: Peer) -> None:
        peer.hello()
        peer.wait_for_end()

    with FakeDaemon(slow, alive) as daemon, connect(daemon) as client:
        client.acquire(model, "E").close()


def test_daemon_that_is_stopped_during_a_request(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr(_call, "SILENCE", 0.1)
    monkeypatch.setattr(_call, "SIGN_OF_LIFE", 0.1)

    def accepts(peer: Peer) -> None:
        client._connections.hello_limit = 0.05  # only from here on, because this daemon may be slow
        peer.hello()
        peer.wait_for_end()

    def stopped(peer: Peer) -> None:
        peer.wait_for_end()

    with FakeDaemon(accepts, stopped) as daemon, connect(daemon, restart_limit=0.2) as client:
        with Waits(2), pytest.raises(epcache.NoDaemon, match="no daemon answers now"):
            client.acquire(model, "E")


def test_restart_during_a_request(model: str, view: Path) -> None:
    def dies(peer: Peer) -> None:
        peer.hello()
        peer.acquire()

    with FakeDaemon(dies, hits(view)) as daemon, connect(daemon) as client:
        client.acquire(model, "E").close()
        assert daemon.connections == 2


def test_request_that_crashes_the_daemon_is_retried_once(model: str) -> None:
    def dies(peer: Peer) -> None:
        peer.hello()
        peer.acquire()

    with FakeDaemon(dies) as daemon, connect(daemon) as client:
        with Waits(2), pytest.raises(epcache.NoDaemon):
            client.acquire(model, "E")
        assert daemon.connections == 2


def test_restart_between_requests(model: str, view: Path) -> None:
    def once(peer: Peer) -> None:
        peer.hello()
        answer(peer, peer.acquire(), view)

    with FakeDaemon(once) as daemon, connect(daemon) as client:
        for _ in range(3):
            client.acquire(model, "E").close()


def test_error_before_the_daemon_closes_is_raised(model: str) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        peer.acquire()
        peer.send({"request": 0, "error": {"class": 7, "text": "that was no request"}})

    with FakeDaemon(script) as daemon, connect(daemon) as client:
        with pytest.raises(epcache.BadRequest, match="that was no request"):
            client.acquire(model, "E")


def everything(view: Path) -> bytes:
    """All bytes that a daemon sends for one hit, without the descriptor."""
    reply = {"request": 1, "acquire_reply": {**REPLY, "view": str(view)}, "descriptors": 1}
    return frame(HELLO) + frame({"request": 1, "progress": {"phase": "probing"}}) + frame(reply)


def sends(data: bytes, then: Callable[[Peer], None]) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        peer.read()
        peer.raw(data[: len(frame(HELLO))])
        if len(data) > len(frame(HELLO)):
            peer.acquire()
            peer.raw(data[len(frame(HELLO)) :])
        then(peer)

    return script


def test_connection_ends_after_every_byte(model: str, view: Path) -> None:
    data = everything(view)
    for length in range(1, len(data)):
        with FakeDaemon(sends(data[:length], lambda peer: None)) as daemon:
            with epcache.Client(daemon.path, hello_limit=10, restart_limit=0) as client, Waits(5):
                with pytest.raises(epcache.NoDaemon):
                    client.acquire(model, "E")


def test_timeout_after_every_byte(model: str, view: Path) -> None:
    data = everything(view)
    for length in [*range(1, len(data), 37), len(data) - 1]:
        with FakeDaemon(sends(data[:length], Peer.wait_for_end)) as daemon:
            with epcache.Client(daemon.path, hello_limit=0.2) as client, Waits(5):
                with pytest.raises((epcache.NoDaemon, epcache.DeadlineExceeded)):
                    client.acquire(model, "E", timeout=0.2)


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", id="another protocol"),
        pytest.param(struct.pack("<I", 0), id="frame of no bytes"),
        pytest.param(struct.pack("<I", (1 << 20) + 1), id="frame too long"),
        pytest.param(struct.pack("<I", 0xFFFFFFFF), id="frame of 4 GiB"),
        pytest.param(struct.pack("<I", 3) + b"\xff\xff\xff", id="no message"),
        pytest.param(struct.pack("<I", 4) + b"\x08\x01\x5a\x7f", id="length beyond the frame"),
        pytest.param(frame({"request": 1, "hello_reply": {"version": 1}}), id="a Hello as answer"),
        pytest.param(frame({"request": 1}), id="an answer without body"),
        pytest.param(frame({"request": 1, "acquire": {}}), id="a request as answer"),
    ],
)
def test_invalid_frames_are_protocol_errors(model: str, garbage: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        peer.acquire()
        peer.raw(garbage)
        peer.wait_for_end()

    with FakeDaemon(script) as daemon, connect(daemon) as client, Waits(2):
        with pytest.raises(epcache.ProtocolError):
            client.acquire(model, "E")


def test_answers_to_other_requests_are_skipped(model: str, view: Path) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        answer(peer, {"request": 77}, view, why="not yours")
        answer(peer, request, view, why="yours")

    with (
        FakeDaemon(script) as daemon,
        connect(daemon) as client,
        client.acquire(model, "E") as artefact,
    ):
        assert artefact.why == "yours"


def test_unknown_fields_and_features_are_ignored(model: str, view: Path) -> None:
    # field 99 twice, number and bytes
    later = bytes([0x98, 0x06, 0x01, 0x9A, 0x06, 0x02, 0x61, 0x62])

    def script(peer: Peer) -> None:
        peer.read()
        for envelope in (HELLO, None):
            request = {"request": 0} if envelope else peer.acquire()
            reply = envelope or {
                "request": request["request"],
                "descriptors": 1,
                "acquire_reply": {**REPLY, "view": str(view)},
            }
            data = frame(reply)[4:] + later
            descriptor = os.open(view, os.O_RDONLY)
            peer.raw(struct.pack("<I", len(data)) + data, [] if envelope else [descriptor])
            os.close(descriptor)

    with FakeDaemon(script) as daemon, connect(daemon) as client:
        client.acquire(model, "E").close()


def reply_with(files: Sequence[Path], announced: int, **reply: object) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        descriptors = [os.open(file, os.O_RDONLY) for file in files]
        try:
            envelope = {
                "request": request["request"],
                "descriptors": announced,
                "acquire_reply": {**REPLY, **reply},
            }
            peer.raw(frame(envelope), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        peer.wait_for_end()

    return script


@pytest.mark.parametrize(
    ("files", "announced", "reply"),
    [
        pytest.param(["view"], 0, {}, id="one that is not announced"),
        pytest.param([], 1, {}, id="none, one announced"),
        pytest.param(["view"], 2, {}, id="one, two announced"),
        pytest.param(["view"], 1, {"fd": 1}, id="index beyond them"),
        pytest.param([], 0, {}, id="an index and none"),
        pytest.param(["file"], 1, {}, id="a file for a directory"),
        pytest.param(["view"] * 200, 64, {}, id="more than a frame may have"),
        pytest.param(["view"], 1, {"graph": "../x_ctx.onnx"}, id="graph outside the view"),
        pytest.param(["view"], 1, {"graph": "/etc/passwd"}, id="graph with an absolute path"),
        pytest.param(["view"], 1, {"graph": ""}, id="no graph"),
        pytest.param(["view"], 1, {"graph": "a\0b"}, id="graph with a zero byte"),
    ],
)
def test_invalid_descriptors_are_protocol_errors(
    model: str, view: Path, files: list[str], announced: int, reply: dict
) -> None:
    paths = [view if name == "view" else Path(model) for name in files]
    with (
        FakeDaemon(reply_with(paths, announced, **reply)) as daemon,
        connect(daemon) as client,
        Waits(2),
    ):
        with pytest.raises(epcache.ProtocolError):
            client.acquire(model, "E")


def test_more_descriptors_than_needed_are_closed(model: str, view: Path) -> None:
    with (
        FakeDaemon(reply_with([Path(model), view, Path(model)], 3, fd=1)) as daemon,
        connect(daemon) as client,
    ):
        with client.acquire(model, "E") as artefact:
            assert Path(artefact.path).read_bytes() == b"compiled"


def test_descriptors_with_a_later_byte_are_ignored(model: str, view: Path) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        data = frame({"request": request["request"], "descriptors": 1, "acquire_reply": REPLY})
        descriptor = os.open(view, os.O_RDONLY)
        peer.raw(data[:4])
        time.sleep(0.05)
        peer.raw(data[4:], [descriptor])
        os.close(descriptor)
        peer.wait_for_end()

    with (
        FakeDaemon(script) as daemon,
        connect(daemon) as client,
        pytest.raises(epcache.ProtocolError, match="0 descriptors instead of 1"),
    ):
        client.acquire(model, "E")


def test_descriptors_with_progress_and_errors_are_closed(model: str, view: Path) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        descriptor = os.open(view, os.O_RDONLY)
        peer.send(
            {"request": request["request"], "progress": {"phase": "p"}}, [descriptor, descriptor]
        )
        peer.send(
            {"request": request["request"], "error": {"class": 12, "text": "t"}}, [descriptor]
        )
        os.close(descriptor)

    with FakeDaemon(script) as daemon, connect(daemon) as client, pytest.raises(epcache.Internal):
        client.acquire(model, "E")


def test_frames_in_one_packet_keep_their_own_descriptors(model: str, view: Path) -> None:
    """Progress and answer arrive together: the answer's descriptor must not be taken with the
    Progress.
    """

    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()["request"]
        progress = frame({"request": request, "progress": {"phase": "probing"}})
        descriptor = os.open(view, os.O_RDONLY)
        peer.raw(progress * 3)
        peer.raw(
            frame(
                {
                    "request": request,
                    "descriptors": 1,
                    "acquire_reply": {**REPLY, "view": str(view)},
                }
            ),
            [descriptor],
        )
        os.close(descriptor)

    with FakeDaemon(script) as daemon, connect(daemon) as client:
        for _ in range(20):
            with client.acquire(model, "E") as artefact:
                assert artefact.fd is not None


def test_daemon_that_asks_for_external_data_for_ever(model: str) -> None:
    Path(model).with_name("w").write_bytes(b"w")

    def script(peer: Peer) -> None:
        peer.hello()
        while True:
            peer.send({"request": peer.acquire()["request"], "need": {"locations": ["w"]}})

    with (
        FakeDaemon(script) as daemon,
        connect(daemon) as client,
        pytest.raises(epcache.ProtocolError, match="more external data in every answer"),
    ):
        client.acquire(model, "E")


def test_request_too_long_for_a_frame(model: str, view: Path) -> None:
    with FakeDaemon(hits(view)) as daemon, connect(daemon) as client:
        with pytest.raises(epcache.BadRequest, match="more than the limit"):
            client.acquire(model, ("E", {"o": "x" * (1 << 20)}))
        client.acquire(model, "E").close()  # nothing was sent, so the connection can be used
        assert daemon.connections == 1


def test_too_many_open_files_for_a_descriptor(model: str, view: Path) -> None:
    descriptor = os.open(view, os.O_RDONLY)

    def script(peer: Peer) -> None:
        peer.hello()
        for _ in range(2):
            request = peer.acquire()
            peer.send(
                {"request": request["request"], "acquire_reply": {**REPLY, "view": str(view)}},
                [descriptor],
            )
        peer.wait_for_end()  # closing here would free a descriptor

    with FakeDaemon(script) as daemon, connect(daemon) as client:
        client.acquire(model, "E").close()
        # Two descriptors are left: for the model of the client, and of the fake daemon in this
        # process.
        with (
            only_free_descriptors(2),
            pytest.raises(epcache.ProtocolError, match="too many open files"),
        ):
            client.acquire(model, "E")
    os.close(descriptor)


@contextlib.contextmanager
def only_free_descriptors(count: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_descriptors()) + 8, limits[1]))
    fillers: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(count):
            os.close(fillers.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for filler in fillers:
            os.close(filler)
