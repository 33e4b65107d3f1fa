"""The progress display, and the parameter output of sessions."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ort = pytest.importorskip(
    "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
)

import epcache  # noqa: E402
from epcache import _progress_display  # noqa: E402
from fake_daemon import FakeDaemon, Peer  # noqa: E402
from openvino_model import source, view  # noqa: E402, F401
from providers import OPENVINO  # noqa: E402
from test_client import answer  # noqa: E402
from test_session import client, serves  # noqa: E402


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    yield
    gc.collect()


STEPS = [
    ("queued", 0, 0),
    ("compiling", 500, 4000),
    ("compiling", 1500, 4000),
    ("checking", 5000, 4000),
]


def compiling(view: Path) -> Any:
    """A fake daemon that sends some steps of progress, and then a hit."""

    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        for phase, elapsed, estimate in STEPS:
            progress = {"phase": phase, "elapsed_ms": elapsed, "estimate_ms": estimate}
            peer.send({"request": request["request"], "progress": progress})
        answer(peer, request, view, outcome="compiled")
        peer.wait_for_end()

    return script


@pytest.fixture
def no_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)


class Bar:
    """A fake tqdm, which records each step."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.total = settings["total"]
        self.bar_format = settings["bar_format"]
        self.n = 0.0
        self.shown: list[tuple[str, float, float | None]] = []
        self.closed = False

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text

    def refresh(self) -> None:
        self.shown.append((self.text, self.n, self.total))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    made: list[Bar] = []

    def tqdm(**settings: Any) -> Bar:
        made.append(Bar(**settings))
        return made[-1]

    module = types.ModuleType("tqdm")
    module.tqdm = tqdm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm", module)
    return made


def test_without_tqdm_each_phase_is_a_line(
    source: str, view: Path, no_tqdm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeDaemon(compiling(view)) as daemon:
        session = epcache.InferenceSession(
            source, ep=OPENVINO.spec, client=client(daemon), progress=True
        )
    assert session.epcache.outcome == "compiled"
    said = capsys.readouterr()
    assert said.out == ""
    ours = [line for line in said.err.splitlines() if line.startswith("model.onnx: ")]
    assert ours == [
        "model.onnx: queued",
        "model.onnx: compiling, about 4 s in all",
        "model.onnx: checking, about 4 s in all",
    ]


def test_tqdm_bar_never_exceeds_its_total(source: str, view: Path, bars: list[Bar]) -> None:
    with FakeDaemon(compiling(view)) as daemon:
        epcache.InferenceSession(source, ep=OPENVINO.spec, client=client(daemon), progress=True)
    (bar,) = bars
    assert bar.settings["desc"] == "model.onnx"
    assert bar.shown == [
        ("queued", 0.0, None),
        ("compiling", 0.5, 4.0),
        ("compiling", 1.5, 4.0),
        ("checking", 5.0, 5.0),
    ]
    assert bar.closed


def test_hit_shows_no_progress(source: str, view: Path, bars: list[Bar]) -> None:
    with FakeDaemon(serves(view)) as daemon:
        session = epcache.InferenceSession(
            source, ep=OPENVINO.spec, client=client(daemon), progress=True
        )
    assert session.epcache.outcome == "hit"
    assert bars == []


def test_bar_ends_with_an_error(bars: list[Bar]) -> None:
    with pytest.raises(ZeroDivisionError), _progress_display.displayed(True, "m") as step:
        assert step is not None
        step(epcache.Progress("compiling", 1.0))
        raise ZeroDivisionError
    assert [bar.closed for bar in bars] == [True]


def test_progress_accepts_a_function_or_none(source: str, view: Path, bars: list[Bar]) -> None:
    said: list[epcache.Progress] = []
    with FakeDaemon(compiling(view)) as daemon:
        epcache.InferenceSession(
            source, ep=OPENVINO.spec, client=client(daemon), progress=said.append
        )
    with FakeDaemon(compiling(view)) as daemon:
        epcache.InferenceSession(source, ep=OPENVINO.spec, client=client(daemon), progress=False)
    assert [(one.phase, one.elapsed_seconds) for one in said] == [
        (phase, ms / 1000) for phase, ms, _ in STEPS
    ]
    assert bars == []


def test_session_sends_its_output(source: str, view: Path) -> None:
    seen: list = []
    with FakeDaemon(serves(view, seen)) as daemon:
        output = epcache.Output(
            external_initializers_file="rest.bin", external_initializers_threshold=64, complete=True
        )
        session = epcache.InferenceSession(
            source, ep=OPENVINO.spec, client=client(daemon), output=output
        )
    assert session.epcache.cached
    ((asked, _),) = seen
    assert asked["output"] == {
        **epcache.Output().message(),
        "external_initializers_file": "rest.bin",
        "external_initializers_threshold": 64,
        "complete": True,
    }


def test_output_cannot_be_used_with_a_claim(source: str) -> None:
    with pytest.raises(ValueError, match="output= cannot be used"):
        epcache.InferenceSession(source, ep=OPENVINO.spec, output=epcache.Output(), on_miss="claim")
