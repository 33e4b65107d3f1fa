"""Sessions run on the execution provider that was asked for: from the cache, without a daemon, and
when things go wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import generate
import inputs
import numpy as np
import onnx
import pytest
import reference
from daemon import Daemon
from onnx import helper

OPENVINO = "OpenVINOExecutionProvider"
EXACT = {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'}


@pytest.fixture(scope="module")
def where(runtime: Callable[[str], Path]) -> Path:
    return runtime("openvino-1.8.1")


@pytest.fixture
def daemon(start: Callable[..., Daemon], where: Path) -> Daemon:
    return start(where)


@pytest.fixture
def run_sessions(where: Path, models: Any) -> Callable[..., Any]:
    """Makes sessions for tiny-mlp in a child that looks for its daemon at the given socket."""

    def sessions(socket: str, ep: Any = (f"{OPENVINO}:CPU", EXACT), **more: Any) -> Any:
        arguments = {
            "model": models.entry("tiny-mlp"),
            "path": str(models.path("tiny-mlp")),
            "ep": ep,
        }
        return child.run(
            "sessions", where, environment={"EPCACHE_SOCKET": socket}, **arguments, **more
        )["sessions"]

    return sessions


def require_on_the_provider(session: dict[str, Any], models: Any) -> None:
    """Every node was executed by OpenVINO, as ONNX Runtime's own profile tells, and the outputs are
    right.
    """
    assert "error" not in session, session
    assert session["executed by"] == [OPENVINO]
    assert session["providers"][0] == OPENVINO
    expected = reference.mlp(models.path("tiny-mlp"), inputs.make(models.entry("tiny-mlp"))["x"])
    np.testing.assert_allclose(
        np.array(session["values"][0], np.float32), expected, rtol=1e-4, atol=1e-4
    )


def test_from_the_cache(daemon: Daemon, run_sessions: Callable[..., Any], models: Any) -> None:
    first, second = run_sessions(daemon.socket, times=2)
    assert (first["outcome"], second["outcome"]) == ("compiled", "hit")
    for session in (first, second):
        require_on_the_provider(session, models)
        assert session["warnings"] == []
    assert first["outputs"] == second["outputs"]


def test_without_a_daemon(run_sessions: Callable[..., Any], models: Any, tmp_path: Path) -> None:
    (session,) = run_sessions(str(tmp_path / "missing"))
    assert session["outcome"] == "no daemon"
    require_on_the_provider(session, models)
    assert len(session["warnings"]) == 1


def test_with_a_daemon_that_was_stopped(
    daemon: Daemon, run_sessions: Callable[..., Any], models: Any
) -> None:
    assert daemon.stop() == 0
    (session,) = run_sessions(daemon.socket)
    assert session["outcome"] == "no daemon"
    require_on_the_provider(session, models)


def test_with_a_daemon_that_does_not_answer(
    daemon: Daemon, run_sessions: Callable[..., Any], models: Any
) -> None:
    daemon.freeze()
    try:
        # and child.py does not wait for an application that waits for it
        (session,) = run_sessions(daemon.socket, hello=None)
    finally:
        daemon.thaw()
    assert session["outcome"] == "no daemon"
    require_on_the_provider(session, models)


def test_artefact_that_does_not_load_is_recompiled_for_the_next_session(
    daemon: Daemon, run_sessions: Callable[..., Any], models: Any
) -> None:
    """The session is made from the source model, on the same provider; the daemon heals what it
    keeps.
    """
    (before,) = run_sessions(daemon.socket)
    (session,) = run_sessions(daemon.socket, truncate_in=str(daemon.state))
    (after,) = run_sessions(daemon.socket)
    assert (before["outcome"], session["outcome"], after["outcome"]) == (
        "compiled",
        "failed",
        "compiled",
    )
    assert "does not load" in session["why"] and len(session["warnings"]) == 1
    for one in (before, session, after):
        require_on_the_provider(one, models)


@pytest.mark.parametrize("ep", [f"{OPENVINO}:NPU", "NoSuchExecutionProvider"])
@pytest.mark.parametrize("there", [True, False], ids=["with a daemon", "without"])
def test_missing_provider_or_device_is_an_error(
    there: bool, ep: str, daemon: Daemon, run_sessions: Callable[..., Any], tmp_path: Path
) -> None:
    (session,) = run_sessions(daemon.socket if there else str(tmp_path / "missing"), ep=ep)
    assert session.get("error") == "Unavailable", session


def test_model_of_which_the_provider_takes_no_node(
    daemon: Daemon, where: Path, tmp_path: Path
) -> None:
    """Such a model runs on the CPU in plain ONNX Runtime as well; what epcache adds is that it says
    so.
    """
    text = onnx.TensorProto.STRING
    graph = helper.make_graph(
        [helper.make_node("StringNormalizer", ["x"], ["y"])],
        "text",
        [helper.make_tensor_value_info("x", text, [1])],
        [helper.make_tensor_value_info("y", text, [1])],
    )
    path = tmp_path / "text.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path
    )
    model = {
        "dimensions": {},
        "inputs": {"x": {"dtype": "str", "shape": [1], "fill": "constant", "value": "text"}},
    }
    arguments: dict[str, Any] = {"model": model, "path": str(path), "ep": f"{OPENVINO}:CPU"}
    (session,) = child.run(
        "sessions", where, environment={"EPCACHE_SOCKET": daemon.socket}, **arguments
    )["sessions"]
    assert session["outcome"] == "failed"
    (warning,) = session["warnings"]
    assert "took no node" in warning and "StringNormalizer" in warning


def test_device_policies_are_resolved_by_the_client(
    daemon: Daemon, where: Path, models: Any
) -> None:
    """The provider that ONNX Runtime chooses by a policy is requested; if that is not possible, the
    session is a plain one with the reason.
    """
    result = child.run(
        "policy",
        where,
        environment={"EPCACHE_SOCKET": daemon.socket},
        model=models.entry("tiny-mlp"),
        path=str(models.path("tiny-mlp")),
        ep=OPENVINO,
    )
    delegate, nothing = result.pop("delegate"), result.pop("nothing registered")
    assert "PREFER_NPU" in result
    assert sorted(session["outcome"] for session in result.values()) == ["compiled"] + ["hit"] * (
        len(result) - 1
    )
    for policy, session in result.items():
        assert session["warnings"] == [], policy
        assert (
            session["providers"] == session["plain"]["providers"]
            and session["providers"][0] == OPENVINO
        )
        assert session["outputs"] == session["plain"]["outputs"], policy
    assert (delegate["outcome"], delegate["providers"][0]) == ("bypassed", OPENVINO)
    assert "set_provider_selection_policy_delegate" in delegate["why"]
    assert (nothing["outcome"], nothing["providers"]) == ("bypassed", ["CPUExecutionProvider"])
    assert "PREFER_NPU chooses CPUExecutionProvider" in nothing["why"]


@pytest.mark.parametrize("version", ["openvino-1.4.0", "openvino-1.8.1"])
def test_stateful_language_model(
    version: str, start: Callable[..., Daemon], runtime: Callable[[str], Path], tmp_path: Path
) -> None:
    """OpenVINO keeps keys and values inside with enable_causallm, which no administrator has to
    allow.
    """
    daemon = start(runtime(version))
    generate.causal(tmp_path / "model.onnx")
    past = {"dtype": "float32", "shape": [1, 2, 0, 8], "fill": "constant", "value": 0}
    tokens = {"dtype": "int64", "shape": [1, 3], "fill": "integers", "low": 0, "high": 32}
    model = {
        "dimensions": {},
        "inputs": {
            "input_ids": tokens,
            "past_key_values.0.key": past,
            "past_key_values.0.value": past,
        },
        "outputs": ["logits"],
    }
    wishes = {
        "model": model,
        "path": str(tmp_path / "model.onnx"),
        "ep": (f"{OPENVINO}:CPU", {**EXACT, "enable_causallm": "True"}),
    }
    sessions = [
        child.run(
            "sessions",
            runtime(version),
            environment={"EPCACHE_SOCKET": daemon.socket},
            **wishes,
            **more,
        )["sessions"][0]
        # in processes of their own: OpenVINO remembers what it loaded by the path
        for more in ({"plain": True}, {}, {})
    ]
    assert [one.get("outcome") for one in sessions] == ["bypassed", "compiled", "hit"], sessions
    for one in sessions:
        assert one["executed by"] == [OPENVINO]
        np.testing.assert_allclose(one["values"][0], sessions[0]["values"][0], rtol=1e-4, atol=1e-4)
