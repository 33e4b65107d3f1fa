"""Artefacts that ONNX Runtime refuses are reported and requested again, or the session falls
back.
"""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from pathlib import Path

import pytest

ort = pytest.importorskip(
    "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
)

import epcache  # noqa: E402
from epcache import _client, _plugins  # noqa: E402
from fake_daemon import FakeDaemon, Peer  # noqa: E402
from providers import INPUTS, Provider, compile_plain, equal, run_plain  # noqa: E402
from test_client import answer  # noqa: E402
from test_faults import Waits  # noqa: E402
from test_session import (  # noqa: E402, F401
    client,
    compiled,
    leases,
    provider,
    source,
    without_daemon,
)

pytestmark = pytest.mark.usefixtures("without_daemon")

RETRY = {"decision": "retry", "text": "damaged, and recompiled"}
SOUND = {"decision": "sound", "text": "it loads here", "hint": "use the provider options"}


@pytest.fixture
def refused(provider: Provider, source: str, tmp_path: Path) -> Path:  # noqa: F811
    """A view with an artefact that does not load: half of its sidecar is missing."""
    compile_plain(provider, source, tmp_path / "refused" / "def", "x_ctx.onnx")
    for file in (tmp_path / "refused" / "def").glob("*.bin"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return tmp_path / "refused"


class Daemon:
    """A fake daemon that serves the views in order, the last one repeatedly, and answers reports
    with the replies in order.
    """

    def __init__(self, views: list[Path], *replies: dict, **more: object) -> None:
        self.views = views
        self.replies = list(replies)
        self.more = more
        self.acquires: list[dict] = []
        self.reports: list[dict] = []
        self.held: list[int] = []  # leases on the first view at the time of each report

    def __call__(self, peer: Peer) -> None:
        peer.hello()
        while True:
            request = peer.read()
            if "report" in request:
                self.reports.append(request["report"])
                self.held.append(leases(self.views[0]))
                self.answer_report(peer, request)
            elif "acquire" in request:
                view = self.views[min(len(self.acquires), len(self.views) - 1)]
                self.acquires.append(request["acquire"])
                (graph,) = view.glob("*/*_ctx.onnx")
                more = {
                    "build": f"build {len(self.acquires)}",
                    "graph": str(graph.relative_to(view)),
                    "why": "w",
                }
                answer(peer, request, view, **{**more, **self.more})

    def answer_report(self, peer: Peer, request: dict) -> None:
        peer.send({"request": request["request"], "report_reply": self.replies.pop(0)})


def make(
    daemon: FakeDaemon, source: str, provider: Provider, **more: object
) -> epcache.InferenceSession:  # noqa: F811
    return epcache.InferenceSession(source, ep=provider.spec, client=client(daemon), **more)


def without_warning(*arguments: object) -> epcache.InferenceSession:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return make(*arguments)


def test_refusal_is_reported_and_the_request_repeated_once(
    provider: Provider,
    source: str,
    refused: Path,
    compiled: Path,  # noqa: F811
) -> None:
    script = Daemon([refused, compiled], RETRY)
    with FakeDaemon(script) as daemon:
        session = without_warning(daemon, source, provider)
        assert session.epcache.outcome == "hit"
        assert session.epcache.build == "build 2"
        assert session.epcache.decisions == [epcache.Decision(**RETRY)]
        assert (
            "does not load" in session.epcache.why
            and "damaged, and recompiled" in session.epcache.why
        )
        assert equal(
            session.run(None, INPUTS), run_plain(provider, compiled / "abc" / "x_ctx.onnx")
        )
        assert (leases(refused), leases(compiled)) == (0, 1), "the refused one is given up"
    assert script.acquires[0]["eps"] == script.acquires[1]["eps"]
    (report,) = script.reports
    assert (report["build"], report["graph"], report["ort_version"]) == (
        "build 1",
        "def/x_ctx.onnx",
        ort.__version__,
    )
    assert report["code"] in (10, 11)
    assert report["text"].startswith(f"[ONNXRuntimeError] : {report['code']} : ")
    (library,) = report["runtime"]["ep_libraries"]
    assert library["path"] == _plugins.plugin(epcache.ExecutionProvider(provider.name)).library.path
    assert script.held == [1], "the daemon can look at the very files while it is told of them"


@pytest.mark.parametrize(
    ("replies", "acquires", "says"),
    [
        pytest.param([SOUND], 1, r"sound: it loads here \(use the provider options\)", id="sound"),
        pytest.param(
            [{"decision": "compile_yourself"}], 1, "compile_yourself", id="nothing better"
        ),
        pytest.param(
            [{"decision": "of a later version"}], 1, "of a later version", id="unknown decision"
        ),
        pytest.param(
            [RETRY, SOUND],
            2,
            "retry: .*; the compiled model does not load.*sound: ",
            id="refused again",
        ),
        pytest.param([RETRY, RETRY], 2, "retry: .*retry: ", id="no third time"),
    ],
)
def test_plain_session_after_refusals(
    provider: Provider,
    source: str,
    refused: Path,
    replies: list[dict],
    acquires: int,
    says: str,  # noqa: F811
) -> None:
    script = Daemon([refused], *replies)
    with FakeDaemon(script) as daemon:
        with pytest.warns(
            epcache.EpcacheWarning, match=f"(?s)failed: the compiled model does not load: .*{says}"
        ) as caught:
            session = make(daemon, source, provider)
        assert len(caught) == 1
        assert (session.epcache.outcome, session.epcache.cached) == ("failed", False)
        assert [d.decision for d in session.epcache.decisions] == [
            reply["decision"] for reply in replies
        ]
        assert session.get_providers()[0] == provider.name
        assert equal(session.run(None, INPUTS), run_plain(provider, source))
        assert leases(refused) == 0
    assert (len(script.acquires), len(script.reports)) == (acquires, acquires)


class Silent(Daemon):
    def answer_report(self, peer: Peer, request: dict) -> None:
        peer.wait_for_end()


class Dying(Daemon):
    def answer_report(self, peer: Peer, request: dict) -> None:
        raise EOFError


class Failing(Daemon):
    def answer_report(self, peer: Peer, request: dict) -> None:
        peer.send({"request": request["request"], "error": {"class": 10, "text": "what?"}})


class Babbling(Daemon):
    def answer_report(self, peer: Peer, request: dict) -> None:
        peer.raw(b"\xff" * 100)


@pytest.mark.parametrize("kind", [Silent, Dying, Failing, Babbling])
def test_report_never_hangs_nor_fails_the_application(
    provider: Provider,
    source: str,
    refused: Path,
    kind: type[Daemon],
    monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:
    monkeypatch.setattr(
        _client.Client.report,
        "__kwdefaults__",
        {**_client.Client.report.__kwdefaults__, "timeout": 0.3},
    )
    script = kind([refused])
    with FakeDaemon(script) as daemon, Waits(10):
        with pytest.warns(epcache.EpcacheWarning, match="the daemon has not answered the report"):
            session = make(daemon, source, provider)
        assert session.epcache.decisions == []
        assert equal(session.run(None, INPUTS), run_plain(provider, source))
        assert leases(refused) == 0
    assert len(script.acquires) == 1


def test_report_text_is_limited() -> None:
    assert _client.Client.report.__kwdefaults__["timeout"] <= 5


def test_second_acquire_fails(provider: Provider, source: str, refused: Path) -> None:  # noqa: F811
    class Once(Daemon):
        def __call__(self, peer: Peer) -> None:
            peer.hello()
            first = peer.acquire()
            answer(peer, first, refused, build="b", graph="def/x_ctx.onnx")
            self.answer_report(peer, peer.read())
            peer.send(
                {"request": peer.acquire()["request"], "error": {"class": 1, "text": "none left"}}
            )

    with FakeDaemon(Once([refused], RETRY)) as daemon:
        with pytest.warns(
            epcache.EpcacheWarning, match="(?s)failed: .*does not load: .*retry.*; none left"
        ):
            session = make(daemon, source, provider, on_miss="fail")
    assert equal(session.run(None, INPUTS), run_plain(provider, source))


def test_one_timeout_for_both_requests(
    provider: Provider,  # noqa: F811
    source: str,  # noqa: F811
    refused: Path,
) -> None:
    class Slow(Daemon):
        def __call__(self, peer: Peer) -> None:
            peer.hello()
            answer(peer, peer.acquire(), refused, build="b", graph="def/x_ctx.onnx")
            self.answer_report(peer, peer.read())
            self.acquires.append(peer.acquire())
            peer.wait_for_end()

    for timeout in (3, 60):  # on a busy machine the first attempt may take all of the time
        script = Slow([refused], RETRY)
        with FakeDaemon(script) as daemon, Waits(timeout):
            with pytest.warns(epcache.EpcacheWarning, match="no answer in time"):
                make(daemon, source, provider, timeout=timeout)
        if script.acquires:
            break
    assert script.acquires[0]["deadline_ms"] < 1000 * timeout


def test_session_on_another_execution_provider_is_a_refusal(
    provider: Provider,
    source: str,
    compiled: Path,
    monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:
    """As if ONNX Runtime had silently fallen back to another provider."""
    real, made = epcache.InferenceSession.get_providers, []

    def cpu_first(self: epcache.InferenceSession) -> list[str]:
        made.append(weakref.ref(self._sess))
        return ["CPUExecutionProvider"] if len(made) <= 2 else real(self)

    class Looking(Daemon):
        def answer_report(self, peer: Peer, request: dict) -> None:
            assert made[0]() is None, "what was made of the artefact must not outlive the lease"
            super().answer_report(peer, request)

    monkeypatch.setattr(epcache.InferenceSession, "get_providers", cpu_first)
    script = Looking([compiled], SOUND)
    with FakeDaemon(script) as daemon:
        with pytest.warns(
            epcache.EpcacheWarning, match="the session runs on CPUExecutionProvider, not on"
        ):
            session = make(daemon, source, provider)
        gc.collect()
        assert leases(compiled) == 0
        assert provider.name in session.get_providers()
    (report,) = script.reports
    assert report["code"] == 0


def test_errors_of_other_origin_are_not_reported(
    provider: Provider,
    source: str,
    compiled: Path,  # noqa: F811
) -> None:
    script = Daemon([compiled], graph_optimization_level="from a later version")
    with FakeDaemon(script) as daemon:
        with pytest.warns(epcache.EpcacheWarning, match="does not load: 'from a later version'"):
            make(daemon, source, provider)
    assert script.reports == []


def test_compatibility_is_shown(
    provider: Provider,  # noqa: F811
    source: str,  # noqa: F811
    compiled: Path,  # noqa: F811
) -> None:
    more = {
        "compatibility": "prefer_recompilation",
        "compatibility_source": "rule qnn-newer-loads-older",
        "compatibility_reason": "made by 2.6.0",
    }
    with FakeDaemon(Daemon([compiled], **more)) as daemon:
        report = without_warning(daemon, source, provider).epcache
    assert (
        report.compatibility,
        report.compatibility_source,
        report.compatibility_reason,
    ) == tuple(more.values())
    assert report.why == "w", "nothing was tried before"


def test_times_count_the_report(
    provider: Provider, source: str, refused: Path, compiled: Path
) -> None:  # noqa: F811
    class Thinking(Daemon):
        def answer_report(self, peer: Peer, request: dict) -> None:
            time.sleep(0.2)
            super().answer_report(peer, request)

    with FakeDaemon(Thinking([refused, compiled], RETRY)) as daemon:
        assert without_warning(daemon, source, provider).epcache.acquire_seconds >= 0.2
