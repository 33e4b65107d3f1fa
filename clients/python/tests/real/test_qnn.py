"""QNN ahead of time: compiled for a phone's processor, served, and run once in the simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import inputs
import numpy as np
import pytest
import reference
from daemon import Daemon

PYTHON_CLIENT = Path(__file__).resolve().parents[2]
QNN = "QNNExecutionProvider"
TARGET = (f"{QNN}:CPU", {"soc_model": "60", "enable_htp_fp16_precision": "1"})


@pytest.fixture(scope="module")
def daemon(start: Callable[..., Daemon], runtime: Callable[[str], Path]) -> Daemon:
    return start(runtime("qnn-2.7.0"), runtime("qnn-2.5.0"))


@pytest.fixture
def application(
    daemon: Daemon, runtime: Callable[[str], Path], models: Any
) -> Callable[..., list[dict[str, Any]]]:
    def sessions(version: str, name: str, ep: Any = TARGET, times: int = 1) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = child.run(
            "sessions",
            runtime(version),
            environment={"EPCACHE_SOCKET": daemon.socket},
            times=times,
            ep=ep,
            model=models.entry(name),
            path=str(models.path(name)),
        )["sessions"]
        assert not any("error" in one for one in result), result
        return result

    return sessions


def test_compile_hit_load_and_run(
    application: Callable[..., list[dict[str, Any]]], models: Any
) -> None:
    first, second = application("qnn-2.7.0", "tiny-mlp", times=2)
    assert (first["outcome"], second["outcome"]) == ("compiled", "hit")
    expected = reference.mlp(models.path("tiny-mlp"), inputs.make(models.entry("tiny-mlp"))["x"])
    for session in (first, second):
        assert session["executed by"] == [QNN]
        # The target computes in 16 bits.
        np.testing.assert_allclose(
            np.array(session["values"][0], np.float32), expected, rtol=2e-2, atol=2e-2
        )
    assert first["outputs"] == second["outputs"]


@pytest.mark.parametrize("name", ["silero-vad", "magika"])
def test_real_model(name: str, application: Callable[..., list[dict[str, Any]]]) -> None:
    first, second = application("qnn-2.7.0", name, times=2)
    assert (first["outcome"], second["outcome"]) == ("compiled", "hit")
    assert QNN in second["executed by"]
    assert first["outputs"] == second["outputs"] and not any(
        output["blank"] for output in second["outputs"]
    )


def test_another_target_is_another_request(
    application: Callable[..., list[dict[str, Any]]],
) -> None:
    (known,) = application("qnn-2.7.0", "tiny-mlp")
    (other,) = application(
        "qnn-2.7.0", "tiny-mlp", (f"{QNN}:CPU", {**TARGET[1], "soc_model": "69"})
    )
    assert other["outcome"] == "compiled"
    assert other["request_key"] != known["request_key"] and other["build"] != known["build"]


def test_another_library_is_another_build(application: Callable[..., list[dict[str, Any]]]) -> None:
    """QNN's device metadata has version 0.1.0 in every release; the library and the SDK distinguish
    them.
    """
    (newer,) = application("qnn-2.7.0", "tiny-convolution")
    older, again = application("qnn-2.5.0", "tiny-convolution", times=2)
    assert (newer["outcome"], older["outcome"], again["outcome"]) == ("compiled", "compiled", "hit")
    assert older["request_key"] == newer["request_key"]
    assert older["build"] == again["build"] != newer["build"]
    (back,) = application("qnn-2.7.0", "tiny-convolution")
    assert (back["outcome"], back["build"]) == ("hit", newer["build"])


REGISTERED = """
import sys, numpy, onnxruntime as ort, onnxruntime_qnn, epcache
name, model = sys.argv[1:]
ort.register_execution_provider_library(name, onnxruntime_qnn.get_library_path())
devices = [d for d in ort.get_ep_devices() if d.ep_name == name and d.device.type.name == "CPU"]
options = epcache.SessionOptions()
options.add_provider_for_devices(
    devices[:1], {"soc_model": "60", "enable_htp_fp16_precision": "1"}
)
session = epcache.InferenceSession(model, options)
print(session.epcache.outcome, session.epcache.why)
print(session.get_providers()[0], session.epcache.request_key)
"""


def test_a_library_is_known_under_any_registration(
    daemon: Daemon, runtime: Callable[[str], Path], models: Any
) -> None:
    """QNN takes its provider's name from the registration; the builds are the same."""

    def session(name: str) -> list[str]:
        environment = {
            **os.environ,
            "EPCACHE_SOCKET": daemon.socket,
            "PYTHONPATH": f"{runtime('qnn-2.7.0')}:{PYTHON_CLIENT}",
        }
        command = [sys.executable, "-c", REGISTERED, name, str(models.path("tiny-mlp"))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        return [lines[-2].split()[0], *lines[-1].split()]

    outcome, _, key = session(QNN)
    assert outcome in ("compiled", "hit")
    for name in ("QNN", "anything"):
        assert session(name) == ["hit", name, key]
