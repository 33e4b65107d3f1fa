"""Reports, explanations and events, against a daemon that works and one that misbehaves."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import epcache
import pytest
from epcache import _messages, _refusal
from fake_daemon import HELLO, FakeDaemon, Peer
from test_client import REPLY, _fork, answer, connect
from test_faults import AT_ONCE, Waits

pytestmark = pytest.mark.usefixtures("no_leak")

EVENT = {"at_ms": 1_500, "kind": "compiled", "model": "m.onnx", "text": "in 2 s", "sequence": 7}


def answers(seen: list, **reply: object) -> Callable[[Peer], None]:
    """Answers every request with one reply, and records the requests."""

    def script(peer: Peer) -> None:
        peer.hello()
        while True:
            request = peer.read()
            seen.append(request)
            assert peer.received == [], "a request without descriptors"
            peer.send({"request": request["request"], **reply})

    return script


# Reports.


def test_report_has_all_arguments() -> None:
    seen: list = []
    reply = {
        "decision": "retry",
        "text": "damaged",
        "hint": "h",
        "class": "stale",
        "state": "damaged",
    }
    runtime = epcache.Runtime("/opt", "1.31.1", "/l.so", (epcache.Library("E", "/e.so", 0),))
    with FakeDaemon(answers(seen, report_reply=reply)) as daemon, connect(daemon) as client:
        decision = client.report(
            "b" * 64, 10, "INVALID_GRAPH", graph="abc/x_ctx.onnx", runtime=runtime, timeout=3
        )
    assert decision == epcache.Decision("retry", "damaged", "h", class_="stale", state="damaged")
    assert str(decision) == "retry: damaged (h)"
    ((envelope),) = seen
    assert 2_000 < envelope["deadline_ms"] <= 3_000
    report = envelope["report"]
    assert (report["build"], report["code"], report["text"]) == ("b" * 64, 10, "INVALID_GRAPH")
    assert (report["graph"], report["ort_version"]) == ("abc/x_ctx.onnx", "1.31.1")
    assert report["runtime"]["ep_libraries"] == [
        {"ep": "E", "path": "/e.so", "beside": [], "complete": False}
    ], "it carries no descriptors"


def test_report_of_an_artefact(model: str, view: Path) -> None:
    seen: list = []

    def script(peer: Peer) -> None:
        peer.hello()
        answer(peer, peer.acquire(), view, build="b")
        request = peer.read()
        seen.append(request["report"])
        peer.send({"request": request["request"], "report_reply": {"decision": "sound"}})

    with (
        FakeDaemon(script) as daemon,
        connect(daemon) as client,
        client.acquire(model, "E") as artefact,
    ):
        assert client.report(artefact, 11, "EP_FAIL").decision == "sound"
    ((report),) = seen
    assert (report["build"], report["graph"]) == ("b", REPLY["graph"])


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param("x" * 10_000, "x" * 4096, id="too long"),
        pytest.param("ä" * 3000, "ä" * 2048, id="cut between characters"),
        pytest.param("x" + "ä" * 3000, "x" + "ä" * 2047, id="cut inside a character"),
        pytest.param("a\udcffb", "a?b", id="bytes that are no text"),
    ],
)
def test_report_text_is_cut_to_its_limit(text: str, want: str) -> None:
    seen: list = []
    with (
        FakeDaemon(answers(seen, report_reply={"decision": "sound"})) as daemon,
        connect(daemon) as client,
    ):
        client.report("b", 1, text)
    assert seen[0]["report"]["text"] == want


def test_report_has_a_timeout() -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        peer.wait_for_end()

    with FakeDaemon(script) as daemon, connect(daemon) as client:
        with Waits(AT_ONCE), pytest.raises(epcache.DeadlineExceeded):
            client.report("b", 10, "t", timeout=0.1)


def test_report_to_a_suspended_daemon_is_a_timeout(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(tmp_path / "s"))
        stopped.listen()
        with (
            epcache.Client(tmp_path / "s") as client,
            Waits(AT_ONCE),
            pytest.raises(epcache.NoDaemon),
        ):
            client.report("b", 10, "t")


def test_report_to_a_daemon_that_restarts() -> None:
    def dies(peer: Peer) -> None:
        peer.hello()
        peer.read()

    seen: list = []
    with (
        FakeDaemon(dies, answers(seen, report_reply={"decision": "sound"})) as daemon,
        connect(daemon) as client,
    ):
        assert client.report("b", 10, "t").decision == "sound"
    assert len(seen) == 1


def test_earlier_daemon_without_reports() -> None:
    error = {"class": 10, "text": "this daemon does not know the request"}
    with FakeDaemon(answers([], error=error)) as daemon, connect(daemon) as client:
        for _ in range(2):  # the connection can be used again
            with pytest.raises(epcache.VersionMismatch):
                client.report("b", 10, "t")
        assert daemon.connections == 1


def test_invalid_answer_to_a_report() -> None:
    with FakeDaemon(answers([], events_reply={})) as daemon, connect(daemon) as client:
        with pytest.raises(epcache.ProtocolError, match="answer to report"):
            client.report("b", 10, "t")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(
            Exception("[ONNXRuntimeError] : 10 : INVALID_GRAPH : Load model from x failed"),
            10,
            id="stale",
        ),
        pytest.param(
            Exception("EP Error [ONNXRuntimeError] : 11 : EP_FAIL : x when using [...]"),
            11,
            id="inside",
        ),
        pytest.param(RuntimeError("bad_function_call"), 6, id="exception of C++"),
        pytest.param(
            epcache.Unavailable("the session has CPUExecutionProvider"), 0, id="another provider"
        ),
        pytest.param(MemoryError(), None, id="no memory"),
        pytest.param(KeyError("level"), None, id="of this package"),
        pytest.param(Exception("[ONNXRuntimeError] : x"), None, id="no number"),
    ],
)
def test_refusal_of_an_error(error: Exception, code: int | None) -> None:
    assert _refusal.refusal_of(error) == (code, str(error))


# Explanations.


def test_explanation_has_the_daemons_answer(model: str) -> None:
    seen: list = []
    difference = {"field": "execution_providers[0].options.precision", "asked": "f16", "found": ""}
    build = {
        "build": "b",
        "state": "withheld",
        "sdk_version": "2026.4",
        "compatibility": "unsupported",
        "created_ms": 9,
    }
    explained = {
        "decision": "stale",
        "reason": "another SDK",
        "request_key": "k",
        "record": "{}",
        "runtime": "/opt",
        "candidates": [
            {"build": build, "reason": "withheld", "differences": [difference]},
            {"served": True},
        ],
        "neighbours": [
            {"request_key": "n", "model_name": "m", "builds": 2, "differences": [difference]}
        ],
        "history": [EVENT],
    }

    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        seen.append(request["acquire"])
        reply = {
            "outcome": "explanation",
            "explanation": explained,
            "compatibility_source": "rule qnn",
        }
        peer.send({"request": request["request"], "acquire_reply": reply})

    with FakeDaemon(script) as daemon, connect(daemon) as client:
        told = client.explain(model, ("E", {"precision": "f16"}), dims={"batch": 1}, on_miss="wait")
    assert seen[0]["on_miss"] == _messages.ENUMS["OnMiss"]["EXPLAIN"]
    assert seen[0]["free_dimensions"] == {"batch": 1}
    assert (told.decision, told.reason, told.request_key, told.runtime) == (
        "stale",
        "another SDK",
        "k",
        "/opt",
    )
    first, second = told.candidates
    assert (first.build, first.state, first.served, first.compatibility) == (
        "b",
        "withheld",
        False,
        "unsupported",
    )
    assert (first.created, first.differences) == (0.009, [epcache.Difference(**difference)])
    assert (second.build, second.served) == ("", True)
    assert told.neighbours == [epcache.Neighbour("n", "m", 2, [epcache.Difference(**difference)])]
    assert told.history == [epcache.Event(1.5, "compiled", "", "", "m.onnx", "in 2 s", "", 7)]


def test_missing_explanation_is_a_protocol_error(model: str, view: Path) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        answer(peer, peer.acquire(), view)

    with FakeDaemon(script) as daemon, connect(daemon) as client:
        with pytest.raises(epcache.ProtocolError, match="no explanation"):
            client.explain(model, "E")


# Events.


def test_past_events() -> None:
    seen: list = []
    with (
        FakeDaemon(answers(seen, events_reply={"events": [EVENT, EVENT]})) as daemon,
        connect(daemon) as client,
    ):
        first, second = client.events(since=1.25, limit=5)
    assert seen[0]["events"] == {"since_ms": 1250, "limit": 5}
    assert first == second == epcache.Event(1.5, "compiled", "", "", "m.onnx", "in 2 s", "", 7)


def publishes(count: int, then: Callable[[Peer], None]) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.read()
        assert "subscribe" in request
        assert request["deadline_ms"] == 0, "the client keeps the time itself"
        for sequence in range(1, count + 1):
            peer.send({"request": request["request"], "event": {**EVENT, "sequence": sequence}})
        then(peer)

    return script


def test_subscription_yields_events() -> None:
    with FakeDaemon(publishes(3, Peer.wait_for_end)) as daemon, connect(daemon) as client:
        with client.subscribe() as events:
            assert [next(events).sequence for _ in range(3)] == [1, 2, 3]


def test_subscription_has_a_connection_of_its_own() -> None:
    with (
        FakeDaemon(publishes(0, Peer.wait_for_end), answers([], events_reply={})) as daemon,
        connect(daemon) as client,
    ):
        with client.subscribe():
            assert client.events() == []
            assert daemon.connections == 2


def test_unreferenced_subscription_is_closed() -> None:
    with FakeDaemon(publishes(1, Peer.wait_for_end)) as daemon, connect(daemon) as client:
        assert next(client.subscribe()).sequence == 1
        gc.collect()


def test_subscription_ends_at_its_timeout() -> None:
    with FakeDaemon(publishes(1, Peer.wait_for_end)) as daemon, connect(daemon) as client:
        for timeout in (0.2, 2.0, 20.0):  # on a busy machine the event itself may be late
            with Waits(timeout + 0.1):
                events = list(client.subscribe(timeout=timeout))
            if events:
                break
        assert len(events) == 1


def test_subscription_closed_by_another_thread_ends() -> None:
    with FakeDaemon(publishes(1, Peer.wait_for_end)) as daemon, connect(daemon) as client:
        events = client.subscribe()
        next(events)
        got: list = []
        thread = threading.Thread(target=lambda: got.append(list(events)))
        thread.start()
        time.sleep(0.05)  # so that the reader blocks; the result does not depend on it
        events.close()
        thread.join(5)
        assert got == [[]]
        assert list(events) == [], "and stays closed"


def test_forked_child_does_not_end_the_parents_subscription() -> None:
    go = threading.Event()

    def later(peer: Peer) -> None:
        go.wait(5)
        peer.send({"request": 1, "event": {**EVENT, "sequence": 2}})
        peer.wait_for_end()

    with (
        FakeDaemon(publishes(1, later)) as daemon,
        connect(daemon) as client,
        client.subscribe() as events,
    ):
        next(events)
        assert os.waitpid(_fork(events.close), 0)[1] == 0
        go.set()
        assert next(events).sequence == 2


def ends(**last: object) -> Callable[[Peer], None]:
    def then(peer: Peer) -> None:
        if last:
            peer.send({"request": 1, **last})

    return then


@pytest.mark.parametrize(
    ("then", "kind"),
    [
        pytest.param(ends(), epcache.NoDaemon, id="the daemon goes away"),
        pytest.param(
            ends(error={"class": 4, "text": "stopping"}), epcache.Busy, id="the daemon is stopped"
        ),
        pytest.param(
            ends(error={"class": 10, "text": "what?"}),
            epcache.VersionMismatch,
            id="an earlier daemon",
        ),
        pytest.param(ends(events_reply={}), epcache.ProtocolError, id="another answer"),
        pytest.param(lambda peer: peer.raw(b"\xff" * 8), epcache.ProtocolError, id="garbage"),
    ],
)
def test_ends_of_a_subscription(then: Callable[[Peer], None], kind: type[Exception]) -> None:
    with FakeDaemon(publishes(2, then)) as daemon, connect(daemon) as client:
        events = client.subscribe()
        assert next(events).sequence == 1
        assert next(events).sequence == 2
        with pytest.raises(kind) as caught:
            next(events)
        assert issubclass(caught.type, kind)
        with pytest.raises(StopIteration):
            next(events)


def test_subscription_without_a_daemon() -> None:
    with Waits(AT_ONCE), pytest.raises(epcache.NoDaemon):
        epcache.Client("/nowhere").subscribe()


def test_daemon_that_exits_before_the_subscription() -> None:
    def script(peer: Peer) -> None:
        peer.read()
        peer.send(HELLO)

    with FakeDaemon(script) as daemon, connect(daemon) as client, pytest.raises(epcache.NoDaemon):
        next(client.subscribe())


def test_incomplete_event_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for an event has no timeout, but the wait for the rest of one has."""
    from epcache import _events

    monkeypatch.setattr(_events, "FRAME_LIMIT", 0.2)
    half = ends_with(b"\x20\0\0\0\x08")
    with FakeDaemon(publishes(0, half)) as daemon, connect(daemon) as client, Waits(2):
        with pytest.raises(epcache.DeadlineExceeded):
            next(client.subscribe())


def ends_with(data: bytes) -> Callable[[Peer], None]:
    def then(peer: Peer) -> None:
        peer.raw(data)
        peer.wait_for_end()

    return then
