"""Models that are compiled in the background: from Python, and from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import epcache
import numpy as np
import pytest
from daemon import Daemon

EP = "OpenVINOExecutionProvider:CPU"
F32 = json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "f32"}})


@pytest.fixture
def daemon(start: Callable[..., Daemon], runtime: Callable[[str], Path]) -> Daemon:
    return start(runtime("openvino-1.8.1"))


def test_background_session_is_plain_and_the_next_is_compiled(
    daemon: Daemon, runtime: Callable[[str], Path], models: Any
) -> None:
    ran = child.run(
        "background",
        runtime("openvino-1.8.1"),
        environment={"EPCACHE_SOCKET": daemon.socket},
        model=models.entry("silero-vad"),
        path=str(models.path("silero-vad")),
        ep=[EP, {"load_config": F32}],
        meanwhile="CPUExecutionProvider",
    )
    first, second = ran["first"], ran["second"]
    assert (first["outcome"], first["providers"]) == ("background", ["CPUExecutionProvider"])
    assert first["job"]
    assert ran["there"]
    assert (second["outcome"], second["providers"][0]) == ("hit", "OpenVINOExecutionProvider")
    for one, other in zip(first["values"], second["values"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    assert daemon.compiles() == 1


def test_get_background_starts_one_job(daemon: Daemon, models: Any) -> None:
    model = str(models.path("silero-vad"))
    (queued,) = daemon.control("get", model, "--ep", EP, "--on-miss", "background")
    assert queued["outcome"] == "queued"
    (again,) = daemon.control("get", model, "--ep", EP, "--on-miss", "background")
    assert again["outcome"] == "hit" or again["job"] == queued["job"]
    (waited,) = daemon.control("get", model, "--ep", EP)
    assert waited["outcome"] in ("hit", "waited")
    assert daemon.control("jobs") == {"jobs": [], "failures": []}
    assert daemon.compiles() == 1


def test_warm_with_wait_returns_when_all_are_compiled(daemon: Daemon, models: Any) -> None:
    paths = [str(models.path(name)) for name in ("tiny-mlp", "tiny-convolution")]
    warmed = daemon.control("warm", *paths, "--ep", EP, "--follow")
    assert all(one["outcome"] in ("compiled", "hit") for one in warmed), warmed
    again = daemon.control("warm", *paths, "--ep", EP)
    assert [one["outcome"] for one in again] == ["hit", "hit"]
    assert [one["build"] for one in again] == [one["build"] for one in warmed]
    assert daemon.compiles() == 2


def test_cancelled_job_leaves_no_build(daemon: Daemon, models: Any) -> None:
    model = str(models.path("mlp-128mib"))
    (queued,) = daemon.control("get", model, "--ep", EP, "--on-miss", "background")
    would = daemon.control("jobs", "cancel", "--all", "-n")
    assert [job["id"] for job in would["jobs"]] == [queued["job"]]
    ended = daemon.control("jobs", "cancel", queued["job"])
    assert [(job["id"], job["state"]) for job in ended["jobs"]] == [(queued["job"], "cancelled")]
    assert daemon.control("list") == []
    (compiled,) = daemon.control("get", model, "--ep", EP)
    assert compiled["outcome"] == "compiled", "that it was cancelled is no failure of the model"


def test_failure_is_remembered_listed_and_removed_by_retry(daemon: Daemon, models: Any) -> None:
    wish = (EP, {"load_config": json.dumps({"CPU": {"NO_SUCH_PROPERTY": "1"}})})
    with epcache.Client(daemon.socket, hello_limit=10) as client:
        queued = client.acquire(models.path("tiny-mlp"), wish, on_miss="background")
        ended = client.follow(queued.job, timeout=120)
        assert ended.state == "failed"
        assert isinstance(ended.error, epcache.CompileFailed)
        assert "NO_SUCH_PROPERTY" in ended.error.text
        with pytest.raises(epcache.CompileFailed, match="NO_SUCH_PROPERTY"):
            client.acquire(models.path("tiny-mlp"), wish, on_miss="background")
        (failure,) = client.jobs().failures
        assert (failure.reason, failure.ep, failure.count) == (
            "refused",
            "OpenVINOExecutionProvider",
            1,
        )
        assert failure.retry > failure.last
        assert [one.build for one in client.retry(failure.build)] == [failure.build]
        assert client.jobs().failures == []
        assert client.acquire(models.path("tiny-mlp"), wish, on_miss="background").job, (
            "it is tried again"
        )
