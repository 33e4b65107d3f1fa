"""What was compiled here, and for which the cache has no room yet: a scripted daemon, real execution providers."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ort = pytest.importorskip("onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes")

import epcache  # noqa: E402
from fake_daemon import FakeDaemon, Peer  # noqa: E402
from providers import INPUTS, OPENVINO, compile_plain, equal, make_model, run_plain  # noqa: E402
from test_claim import REPLY  # noqa: E402
from test_client import answer  # noqa: E402

WHY = "not kept yet: it takes 16.0 KiB on disk; of the budget of 1.0 MiB are used: 1.0 MiB by builds"


@pytest.fixture(autouse=True)
def available() -> Iterator[None]:
    if reason := OPENVINO.missing():
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    gc.collect()


class Full:
    """A daemon that takes what is put and keeps it later, or does not."""

    def __init__(self, view: Path, ends: str) -> None:
        self.view = view
        self.ends = ends
        self.kept = False
        self.said: list[str] = []

    def script(self, peer: Peer) -> None:
        peer.hello()
        while True:
            request = peer.read()
            number = {"request": request["request"]}
            self.said += [word for word in ("acquire", "put", "follow", "give_up") if word in request]
            if "acquire" in request and self.kept:
                answer(peer, request, self.view)
            elif "acquire" in request:
                peer.send({**number, "acquire_reply": REPLY})
            elif "put" in request:
                assert request["put"]["later"]
                peer.send({**number, "acquire_reply": {"outcome": "queued", "job": "j1", "why": WHY}})
            elif "follow" in request:
                assert request["follow"]["job"] == "j1"
                self.kept = self.ends == "done"
                peer.send({**number, "jobs_reply": {"jobs": [{"id": "j1", "state": self.ends}]}})


@pytest.mark.parametrize("ends", ["done", "failed"])
def test_session_of_what_is_kept_later(ends: str, tmp_path: Path) -> None:
    source = make_model(tmp_path / "model.onnx")
    compile_plain(OPENVINO, source, tmp_path / "view" / "abc", "x_ctx.onnx")
    daemon = Full(tmp_path / "view", ends)
    with FakeDaemon(daemon.script) as fake, epcache.Client(fake.path, hello_limit=10) as client:
        session = epcache.InferenceSession(source, ep=OPENVINO.spec, client=client, on_miss="claim")
        assert equal(session.run(None, INPUTS), run_plain(OPENVINO, source))
        report: Any = session.epcache
        if ends == "done":
            assert (report.outcome, report.cached) == ("hit", True), "it is not compiled a second time"
            assert daemon.said == ["acquire", "put", "follow", "acquire"]
        else:
            assert (report.outcome, report.cached, report.job) == ("queued", False, "j1")
            assert daemon.said == ["acquire", "put", "follow"]
        assert WHY in report.why
