"""Claims: their own connection, and put with the compiled files as descriptors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import epcache
import pytest
from fake_daemon import FakeDaemon, Peer
from test_client import answer, connect

pytestmark = pytest.mark.usefixtures("no_leak")

CLAIM = {
    "id": "c1",
    "output": "0123456789abcdef_ctx.onnx",
    "deadline_ms": 60_000,
    "route": "compile_api",
}
REPLY: dict[str, Any] = {"outcome": "claim", "claim": CLAIM, "graph_optimization_level": "basic"}


class Claiming:
    """A fake daemon that gives a claim to each request, and records how it ends."""

    def __init__(self, put: Callable[[Peer, dict[str, Any]], None]) -> None:
        self.put = put
        self.said: list[dict[str, Any]] = []
        self.ended = threading.Event()  # a connection

    def script(self, peer: Peer) -> None:
        peer.hello()
        try:
            while True:
                request = peer.read()
                number = {"request": request["request"]}
                if "acquire" in request:
                    peer.send({**number, "acquire_reply": REPLY})
                elif "put" in request:
                    files = [
                        os.pread(fd, 100, 0).decode()
                        for fd in peer.received[-len(request["put"]["files"]) :]
                    ]
                    self.said.append({**request["put"], "contents": files})
                    self.put(peer, request)
                elif "give_up" in request:
                    self.said.append(request["give_up"])
                    peer.send({**number, "give_up_reply": {}})
                elif "attach" not in request:
                    peer.send({**number, "jobs_reply": {}})
        finally:
            self.ended.set()


def takes(view: Path) -> Callable[[Peer, dict[str, Any]], None]:
    return lambda peer, request: answer(peer, request, view, outcome="put")


def refuses(peer: Peer, request: dict[str, Any]) -> None:
    peer.send(
        {"request": request["request"], "error": {"class": 7, "text": "no node refers to file x"}}
    )


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The output directory of a compile."""
    directory = tmp_path / "made"
    (directory / "sub").mkdir(parents=True)
    (directory / CLAIM["output"]).write_text("graph")
    (directory / "a.bin").write_text("a")
    (directory / "sub" / "b.bin").write_text("b")
    return directory


def test_put_sends_all_files_with_the_graph_first(model: str, view: Path, made: Path) -> None:
    daemon = Claiming(takes(view))
    with FakeDaemon(daemon.script) as fake, connect(fake) as client:
        answered = client.acquire(model, "E", on_miss="claim")
        claim = answered.claim
        assert claim is not None
        assert (answered.outcome, claim.id, claim.output, claim.route) == (
            "claim",
            "c1",
            CLAIM["output"],
            "compile_api",
        )
        with claim.put(
            made, ort_version="1.31.1", made_by=[("E", "2.0")], compile_seconds=1.5
        ) as artefact:
            assert artefact.outcome == "put"
            assert Path(artefact.path).read_bytes() == b"compiled"
    (put,) = daemon.said
    assert [file["name"] for file in put["files"]] == [CLAIM["output"], "a.bin", "sub/b.bin"]
    assert put["contents"] == ["graph", "a", "b"]
    assert (put["claim"], put["graphs"], put["ort_version"], put["compile_seconds"]) == (
        "c1",
        1,
        "1.31.1",
        1.5,
    )
    assert put["made_by"] == [{"ep": "E", "version": "2.0"}]


def test_put_accepts_the_earlier_parameter_name(model: str, view: Path, made: Path) -> None:
    daemon = Claiming(takes(view))
    with FakeDaemon(daemon.script) as fake, connect(fake) as client:
        claim = client.acquire(model, "E", on_miss="claim").claim
        assert claim is not None
        with pytest.warns(DeprecationWarning, match="folder is now named directory"):
            claim.put(folder=made).close()
    assert len(daemon.said) == 1


def test_claim_has_a_connection_of_its_own(model: str, view: Path, made: Path) -> None:
    daemon = Claiming(takes(view))
    with FakeDaemon(daemon.script) as fake, connect(fake) as client:
        claim = client.acquire(model, "E", on_miss="claim").claim
        assert claim is not None
        client.jobs()
        assert fake.connections == 2, "no other request goes over the claim's connection"
        claim.put(made).close()
        client.jobs()
        client.close()
    assert fake.connections == 2, "which is anybody's when it is over"


@pytest.mark.parametrize("how", ["close", "artefact", "forgotten"])
def test_claim_ends_with_its_connection(how: str, model: str, view: Path) -> None:
    daemon = Claiming(takes(view))
    with FakeDaemon(daemon.script) as fake, connect(fake) as client:
        answered = client.acquire(model, "E", on_miss="claim")
        assert answered.claim is not None
        assert not daemon.ended.is_set()
        if how == "close":
            answered.claim.close()
            answered.claim.close()
        elif how == "artefact":
            answered.close()
        else:
            del answered
        assert daemon.ended.wait(10)
    assert daemon.said == []


def test_give_up_sends_the_reason(model: str, view: Path, made: Path) -> None:
    daemon = Claiming(takes(view))
    with FakeDaemon(daemon.script) as fake, connect(fake) as client:
        claim = client.acquire(model, "E", on_miss="claim").claim
        assert claim is not None
        claim.give_up("ü" * 4000, 11)
        claim.give_up("again: it has ended")
        with pytest.raises(epcache.NotFound, match="ended"):
            claim.put(made)
    (said,) = daemon.said
    assert (said["claim"], said["code"], said["text"]) == ("c1", 11, "ü" * 2048)


def test_refused_put_ends_the_claim(model: str, made: Path) -> None:
    daemon = Claiming(refuses)
    with FakeDaemon(daemon.script) as fake, connect(fake) as client:
        claim = client.acquire(model, "E", on_miss="claim").claim
        assert claim is not None
        with pytest.raises(epcache.BadRequest, match="no node refers to file x"):
            claim.put(made)
        assert daemon.ended.wait(10), "or the daemon would wait for another try"


@pytest.mark.parametrize("damage", ["no graph", "a link to a directory", "too many files"])
def test_put_refuses_an_invalid_directory(damage: str, model: str, view: Path, made: Path) -> None:
    if damage == "no graph":
        (made / CLAIM["output"]).unlink()
    elif damage == "a link to a directory":
        (made / "a.bin").unlink()
        os.mkfifo(made / "a.bin")
    else:
        for number in range(64):
            (made / f"{number}.bin").touch()
    daemon = Claiming(takes(view))
    with FakeDaemon(daemon.script) as fake, connect(fake) as client:
        with client.acquire(model, "E", on_miss="claim") as answered:
            assert answered.claim is not None
            with pytest.raises((OSError, ValueError, epcache.BadModel)):
                answered.claim.put(made)
    assert daemon.said == []


def test_claim_has_the_stamps_of_the_models_files(model: str, tmp_path: Path) -> None:
    daemon = Claiming(refuses)
    with FakeDaemon(daemon.script) as fake, connect(fake) as client:
        with client.acquire(model, "E", on_miss="claim") as answered:
            assert answered.claim is not None
            info = os.stat(model)
            assert answered.claim.sources == {
                model: (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
            }
        with client.acquire(b"bytes", "E", on_miss="claim") as answered:
            assert answered.claim is not None
            assert answered.claim.sources == {}


def test_neighbouring_libraries_are_sent_with_beside(
    tmp_path: Path, model: str, view: Path
) -> None:
    directory = tmp_path / "ep"
    directory.mkdir()
    for name in ("libep.so", "libsdk.so.2.1", "libother.so", "notes.txt", ".libhidden.so"):
        (directory / name).write_text(name)
    (directory / "liblink.so").symlink_to("libsdk.so.2.1")
    (directory / "directory.so").mkdir()
    (tmp_path / "ep.libs").mkdir()
    (tmp_path / "ep.libs" / "libc++-71bc.so.1.0").write_text("brought along")
    seen: list[tuple[dict[str, Any], list[str]]] = []

    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        seen.append(
            (
                request["acquire"],
                [os.pread(fd, 100, 0).decode(errors="replace") for fd in peer.received],
            )
        )
        answer(peer, request, view)

    library = os.open(directory / "libep.so", os.O_RDONLY)
    runtime = epcache.Runtime(
        libraries=(epcache.Library("E", str(directory / "libep.so"), library, beside=True),)
    )
    with FakeDaemon(script) as fake, connect(fake) as client:
        client.acquire(model, "E", runtime=runtime).close()
    os.close(library)
    ((request, contents),) = seen
    (shown,) = request["runtime"]["ep_libraries"]
    assert contents[shown["fd"]] == "libep.so"
    assert shown["complete"]
    assert {one["location"]: contents[one["fd"]] for one in shown["beside"]} == {
        "libsdk.so.2.1": "libsdk.so.2.1",
        "liblink.so": "libsdk.so.2.1",
        "libother.so": "libother.so",
        "../ep.libs/libc++-71bc.so.1.0": "brought along",
    }


def unavailable(peer: Peer, request: dict[str, Any], instead: str) -> None:
    error = {"class": 11, "text": "not registered", "facts": {"instead": instead}}
    peer.send({"request": request["request"], "error": error})


class Without:
    """A fake daemon that does not have the client's libraries. It records for each request whether
    neighbouring libraries were sent, and on_miss.
    """

    def __init__(self, *instead: str) -> None:
        self.instead = list(instead)
        self.asked: list[tuple[bool, int]] = []

    def script(self, peer: Peer) -> None:
        peer.hello()
        while True:
            request = peer.acquire()
            (library,) = request["acquire"]["runtime"]["ep_libraries"]
            self.asked.append((library["complete"], request["acquire"]["on_miss"]))
            if self.instead:
                unavailable(peer, request, self.instead.pop(0))
            else:
                peer.send({"request": request["request"], "acquire_reply": REPLY})


WAIT, CLAIMING = 0, 6


@pytest.fixture
def other(tmp_path: Path) -> Iterator[epcache.Runtime]:
    """A runtime with libraries that the daemon does not have."""
    path = tmp_path / "other" / "libep.so"
    path.parent.mkdir()
    path.write_text("library")
    library = os.open(path, os.O_RDONLY)
    yield epcache.Runtime(
        ort_version="1.31.1", libraries=(epcache.Library("E", str(path), library),)
    )
    os.close(library)


def test_neighbouring_libraries_are_sent_when_the_daemon_asks(
    model: str, other: epcache.Runtime
) -> None:
    daemon = Without("show claim own")
    with FakeDaemon(daemon.script) as fake, connect(fake) as client:
        client.acquire(model, "E", runtime=other).close()
        client.acquire(model, "E", runtime=other).close()
    assert daemon.asked == [(False, WAIT), (True, WAIT), (True, WAIT)], (
        "the second time they are shown at once"
    )


def test_claim_is_requested_if_the_caller_can_compile(model: str, other: epcache.Runtime) -> None:
    daemon = Without("show claim own", "claim own")
    with FakeDaemon(daemon.script) as fake, connect(fake) as client:
        answered = client.acquire(model, "E", runtime=other, may_claim=True)
        assert answered.outcome == "claim"
        answered.close()
    assert daemon.asked == [(False, WAIT), (True, WAIT), (True, CLAIMING)]


def test_users_own_daemon_is_used_after_the_system_daemon_refuses(
    model: str, other: epcache.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, own = Without("own"), Without()
    with FakeDaemon(system.script) as one, FakeDaemon(own.script) as two:
        sockets = [one.path]

        def start(dial: Callable[[str], Any], until: float) -> Any:
            sockets.insert(0, two.path)
            return dial(two.path)

        monkeypatch.delenv("EPCACHE_SOCKET", raising=False)
        monkeypatch.delenv("EPCACHE_AUTOSTART", raising=False)
        monkeypatch.setattr("epcache._connections.default_sockets", lambda: sockets)
        monkeypatch.setattr("epcache._autostart.connect", start)
        with epcache.Client() as client:
            first = client.acquire(model, "E", runtime=other)  # a claim, which keeps its connection
            client.acquire(model, "E", runtime=other).close()
            first.close()
    assert (len(system.asked), len(own.asked)) == (1, 2)


def test_error_is_raised_without_a_possible_alternative(model: str, other: epcache.Runtime) -> None:
    daemon = Without("show claim own", "claim own")
    with (
        FakeDaemon(daemon.script) as fake,
        connect(fake) as client,
        pytest.raises(epcache.Unavailable, match="not registered"),
    ):
        # the caller cannot compile, and no daemon is started for a named socket
        client.acquire(model, "E", runtime=other)
    assert daemon.asked == [(False, WAIT), (True, WAIT)]
