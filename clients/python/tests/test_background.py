"""Sessions that do not wait: a scripted daemon, real execution providers."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ort = pytest.importorskip(
    "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
)

import epcache  # noqa: E402
from fake_daemon import FakeDaemon, Peer  # noqa: E402
from providers import INPUTS, OPENVINO, compile_plain, equal, make_model, run_plain  # noqa: E402
from test_client import answer  # noqa: E402


@pytest.fixture(autouse=True)
def available() -> Iterator[None]:
    if reason := OPENVINO.missing():
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a background session is no reason for a warning
        yield
    gc.collect()


@pytest.fixture
def source(tmp_path: Path) -> str:
    return make_model(tmp_path / "model.onnx")


class Compiling:
    """A daemon that has the model only when `there` is set."""

    def __init__(self, view: Path) -> None:
        self.view = view
        self.there = False
        self.asked: list[int] = []

    def script(self, peer: Peer) -> None:
        peer.hello()
        while True:
            request = peer.read()
            number = {"request": request["request"]}
            if "follow" in request:
                self.there = True
                peer.send({**number, "jobs_reply": {"jobs": [{"id": "j1", "state": "done"}]}})
                continue
            self.asked.append(request["acquire"]["on_miss"])
            if self.there:
                answer(peer, request, self.view)
            elif request["acquire"]["on_miss"] == 5:
                peer.send(
                    {
                        **number,
                        "acquire_reply": {
                            "outcome": "background",
                            "job": "j1",
                            "why": "it is being compiled",
                        },
                    }
                )
            else:
                peer.send({**number, "error": {"class": 1, "text": "there is none"}})


@pytest.fixture
def compiling(source: str, tmp_path: Path) -> Iterator[tuple[Compiling, Callable[..., Any]]]:
    compile_plain(OPENVINO, source, tmp_path / "view" / "abc", "x_ctx.onnx")
    state = Compiling(tmp_path / "view")
    with FakeDaemon(state.script) as daemon, epcache.Client(daemon.path, hello_limit=10) as client:

        def session(**more: Any) -> epcache.InferenceSession:
            return epcache.InferenceSession(
                source, ep=OPENVINO.spec, client=client, on_miss="background", **more
            )

        yield state, session


def test_background_makes_a_plain_session_and_later_a_cached_one(
    compiling: Any, source: str
) -> None:
    state, session = compiling
    first = session()
    assert (first.epcache.outcome, first.epcache.cached, first.epcache.job) == (
        "background",
        False,
        "j1",
    )
    assert first.epcache.why == "it is being compiled"
    assert first.get_providers()[0] == OPENVINO.name
    assert not first.epcache.ready
    assert first.epcache.wait()
    assert first.epcache.ready
    second = session()
    assert (second.epcache.outcome, second.epcache.ready) == ("hit", True)
    assert equal(first.run(None, INPUTS), run_plain(OPENVINO, source))
    assert equal(second.run(None, INPUTS), first.run(None, INPUTS))
    assert set(state.asked) == {1, 5}, "whether it is there is asked without having it compiled"


def test_meanwhile_on_another_execution_provider(compiling: Any, source: str) -> None:
    _, session = compiling
    first = session(meanwhile="CPUExecutionProvider")
    assert first.get_providers() == ["CPUExecutionProvider"]
    assert first.epcache.wait()
    second = session(meanwhile="CPUExecutionProvider")
    assert second.get_providers()[0] == OPENVINO.name


@pytest.mark.parametrize(
    "more", [{"on_miss": "wait"}, {"on_miss": "background", "meanwhile": "NoSuchExecutionProvider"}]
)
def test_invalid_meanwhile_is_an_error(source: str, more: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="meanwhile"):
        epcache.InferenceSession(
            source, ep=OPENVINO.spec, client=False, **{"meanwhile": "CPUExecutionProvider", **more}
        )


def test_ready_is_false_without_a_daemon(compiling: Any) -> None:
    state, session = compiling
    first = session()
    first.epcache._pending.client.close()
    first.epcache._pending.client._connections.socket = "/nowhere"
    assert not first.epcache.ready
    assert not first.epcache.wait(0.1)
