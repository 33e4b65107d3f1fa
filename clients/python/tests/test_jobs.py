"""Jobs: list, follow, cancel and retry."""

from __future__ import annotations

from typing import Any

import epcache
import pytest
from fake_daemon import FakeDaemon, Peer
from test_client import connect
from test_faults import AT_ONCE, Waits

pytestmark = pytest.mark.usefixtures("no_leak")

JOB: dict[str, Any] = {
    "id": "j1",
    "state": "running",
    "phase": "compiling",
    "model_name": "det.onnx",
    "ep": "A",
    "uid": 7,
    "waiting": 2,
    "queued_ms": 1_000_500,
    "started_ms": 1_001_000,
    "elapsed_ms": 2500,
    "estimate_ms": 30_000,
    "why": "requested",
}
FAILURE: dict[str, Any] = {
    "build": "b",
    "reason": "crash",
    "facts": {"signal": "SIGSEGV"},
    "count": 3,
    "retry_ms": 9000,
}


def answers(seen: list[dict[str, Any]], *frames: dict[str, Any]):
    """Takes one request, and answers it with these frames."""

    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.read()
        seen.append(request)
        for frame in frames:
            peer.send({"request": request["request"], **frame})
        peer.wait_for_end()

    return script


def test_jobs_and_failures() -> None:
    reply = {"jobs_reply": {"jobs": [JOB], "failures": [FAILURE]}}
    with FakeDaemon(answers([], reply)) as daemon, connect(daemon) as client:
        found = client.jobs()
    (job,), (failure,) = found.jobs, found.failures
    assert (job.id, job.state, job.phase, job.uid, job.waiting, job.background) == (
        "j1",
        "running",
        "compiling",
        7,
        2,
        False,
    )
    assert (job.queued, job.started, job.elapsed_seconds, job.estimate_seconds) == (
        1000.5,
        1001.0,
        2.5,
        30.0,
    )
    assert job.error is None
    assert (failure.reason, failure.facts, failure.count, failure.retry) == (
        "crash",
        {"signal": "SIGSEGV"},
        3,
        9.0,
    )


def test_follow_reports_progress_and_the_result() -> None:
    seen: list[dict[str, Any]] = []
    progress = {
        "progress": {
            "phase": "compiling",
            "elapsed_ms": 1500,
            "estimate_ms": 3000,
            "job": "j1",
            "waiting": 2,
        }
    }
    error = {"class": 3, "text": "compiler crashed", "facts": {"signal": "SIGSEGV"}}
    end = {"jobs_reply": {"jobs": [{**JOB, "state": "failed", "error": error}]}}
    said: list[epcache.Progress] = []
    with FakeDaemon(answers(seen, progress, end)) as daemon, connect(daemon) as client:
        job = client.follow("j1", progress=said.append)
    assert seen[0]["follow"] == {"job": "j1"}
    assert [
        (one.phase, one.elapsed_seconds, one.estimate_seconds, one.job, one.waiting) for one in said
    ] == [("compiling", 1.5, 3.0, "j1", 2)]
    assert job.state == "failed"
    assert isinstance(job.error, epcache.CompileFailed)
    assert job.error.facts == {"signal": "SIGSEGV"}


def test_follow_has_a_timeout() -> None:
    with FakeDaemon(answers([])) as daemon, connect(daemon) as client:
        with Waits(AT_ONCE), pytest.raises(epcache.DeadlineExceeded):
            client.follow("j1", timeout=0.1)


def test_follow_of_an_unknown_job() -> None:
    error = {"error": {"class": 1, "text": "no such job"}}
    with FakeDaemon(answers([], error)) as daemon, connect(daemon) as client:
        with pytest.raises(epcache.NotFound, match="no such job"):
            client.follow("j1")


def test_cancel_and_retry() -> None:
    seen: list[dict[str, Any]] = []
    cancelled = answers(seen, {"jobs_reply": {"jobs": [{**JOB, "state": "cancelled"}]}})
    forgotten = answers(seen, {"jobs_reply": {"failures": [FAILURE]}})
    with FakeDaemon(cancelled) as daemon, connect(daemon) as client:
        assert [job.state for job in client.cancel("j1", "j2")] == ["cancelled"]
    with FakeDaemon(forgotten) as daemon, connect(daemon) as client:
        assert [failure.build for failure in client.retry("det.onnx")] == ["b"]
    assert seen[0]["cancel_jobs"] == {"jobs": ["j1", "j2"], "all": False}
    assert seen[1]["retry_jobs"] == {"entries": ["det.onnx"], "all": False}


def test_background_is_answered_with_its_job(model: str) -> None:
    seen: list[dict[str, Any]] = []
    reply = {"acquire_reply": {"outcome": "background", "job": "j1"}}
    with FakeDaemon(answers(seen, reply)) as daemon, connect(daemon) as client:
        with client.acquire(model, "E", on_miss="background", keep_going=True) as artefact:
            assert (artefact.outcome, artefact.job, artefact.fd) == ("background", "j1", None)
    assert (seen[0]["acquire"]["on_miss"], seen[0]["acquire"]["keep_going"]) == (5, True)
