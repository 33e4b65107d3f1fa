"""Refused artefacts, explanations and events with the real daemon."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import real_daemon

ort = pytest.importorskip(
    "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
)

import epcache  # noqa: E402
from providers import INPUTS, Provider, equal, make_model, run_plain  # noqa: E402
from real_daemon import Daemon  # noqa: E402
from test_daemon import every_warning_is_an_error, own, provider, session  # noqa: E402, F401

pytestmark = [
    pytest.mark.skipif(bool(real_daemon.missing()), reason=real_daemon.missing() or "-"),
    pytest.mark.usefixtures("every_warning_is_an_error"),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long timeout for reports, because the machine of the tests may be busy."""
    defaults = {**epcache.Client.report.__kwdefaults__, "timeout": 60.0}
    monkeypatch.setattr(epcache.Client.report, "__kwdefaults__", defaults)


@pytest.fixture
def before_load(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Calls a function before each load of an artefact, with the number of the load."""

    def install(action: Callable[[int], None]) -> None:
        load, count = epcache.InferenceSession._load, iter(range(1, 100))

        def hooked(self: epcache.InferenceSession, path: str, options: object) -> None:
            if str(path).startswith("/proc/"):
                action(next(count))
            load(self, path, options)

        monkeypatch.setattr(epcache.InferenceSession, "_load", hooked)

    return install


class Listener:
    """Collects the daemon's events while it is open."""

    def __init__(self, client: epcache.Client) -> None:
        self.subscription = client.subscribe()
        self.heard: list[epcache.Event] = []
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        for event in self.subscription:
            with self.changed:
                self.heard.append(event)
                self.changed.notify_all()

    def wait_for(self, kind: str, model: str) -> epcache.Event:
        def found() -> epcache.Event | None:
            return next((e for e in self.heard if (e.kind, e.model) == (kind, model)), None)

        with self.changed:
            assert self.changed.wait_for(lambda: found() is not None, 30), self.heard
            return found()

    def close(self) -> None:
        self.subscription.close()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def listener(own: Daemon) -> Iterator[Listener]:  # noqa: F811
    with own.client() as client:
        listener = Listener(client)
        yield listener
        listener.close()


def halve(path: Path) -> None:
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)
    path.chmod(0o444)


def test_artefact_damaged_during_the_load_is_recompiled(
    provider: Provider,
    own: Daemon,
    tmp_path: Path,
    before_load: Callable,
    listener: Listener,  # noqa: F811
) -> None:
    """The daemon finds the damage and recompiles, and the same session loads the new build."""
    source = make_model(tmp_path / "model.onnx", seed=21)
    before_load(lambda number: halve(own.blobs()[0]) if number == 1 else None)
    with own.client() as client:
        mended = session(source, provider, client)
    assert mended.epcache.cached, mended.epcache
    assert mended.epcache.outcome == "compiled"
    assert [d.decision for d in mended.epcache.decisions] == ["retry"]
    assert "does not load" in mended.epcache.why
    assert equal(mended.run(None, INPUTS), run_plain(provider, mended.epcache.path))
    assert listener.wait_for("report", f"{tmp_path.name}/model.onnx").build == mended.epcache.build


def test_report_of_a_valid_artefact_withholds_nothing(
    provider: Provider,
    own: Daemon,
    tmp_path: Path,
    before_load: Callable,  # noqa: F811
) -> None:
    source = make_model(tmp_path / "model.onnx", seed=22)

    def refuse(number: int) -> None:
        if number == 1:
            raise RuntimeError("[ONNXRuntimeError] : 10 : INVALID_GRAPH : not for this session")

    before_load(refuse)
    with own.client() as client:
        with pytest.warns(
            epcache.EpcacheWarning,
            match="(?s)does not load: .*INVALID_GRAPH.*the daemon says sound",
        ):
            plain = session(source, provider, client)
        assert plain.epcache.outcome == "failed"
        (decision,) = plain.epcache.decisions
        assert (decision.decision, decision.state) == ("sound", "current")
        assert equal(plain.run(None, INPUTS), run_plain(provider, source))
        assert session(source, provider, client).epcache.outcome == "hit", (
            "nothing was taken from anybody"
        )


def test_report_of_an_unknown_build_is_an_error(own: Daemon) -> None:  # noqa: F811
    with own.client() as client, pytest.raises(epcache.NotFound):
        client.report("0" * 64, 10, "INVALID_GRAPH")


def test_explanations_and_events(
    provider: Provider,  # noqa: F811
    own: Daemon,
    tmp_path: Path,
) -> None:
    source = make_model(tmp_path / "model.onnx", seed=23)
    with own.client() as client:
        before = client.explain(source, provider.spec)
        assert (before.decision, before.candidates) == ("miss", [])
        made = client.acquire(source, provider.spec)
        made.close()
        assert made.outcome == "compiled", "an explanation compiles nothing"
        after = client.explain(source, provider.spec)
        assert (after.decision, after.request_key) == ("hit", made.request_key)
        assert [(c.build, c.served) for c in after.candidates] == [(made.build, True)]
        events = [event for event in client.events() if event.request_key == made.request_key]
    assert [event.kind for event in events] == ["compiled"]
    assert (events[0].model, events[0].build) == (f"{tmp_path.name}/model.onnx", made.build)
    assert made.compatibility_source == "same library"


def test_daemon_that_is_stopped_ends_the_subscription(own: Daemon) -> None:  # noqa: F811
    with own.client() as client:
        subscription = client.subscribe()
        client.events()
        own.stop()
        with pytest.raises((epcache.Busy, epcache.NoDaemon)):
            while True:
                next(subscription)
