"""epcachectl run with a model that is not in the cache: the effect of each --on-miss, and of a
model that does not compile.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from running import CPU, OPENVINO, PROGRAMS, Run

EP = ("--ep", f"{OPENVINO}:CPU")


@pytest.fixture
def model(models: Any, tmp_path: Path) -> str:
    """A model that no other test has compiled, because it contains a unique name."""
    graph = onnx.load(models.path("tiny-mlp"))
    graph.producer_name = tmp_path.name
    graph.graph.name = tmp_path.name
    onnx.save(graph, tmp_path / "model.onnx")
    return str(tmp_path / "model.onnx")


def program(run: Run, model: str, *flags: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what the program printed, and the report of its one session."""
    ended, report = run.python(PROGRAMS / "plain.py", model, "names", flags=(*EP, *flags))
    assert ended.returncode == 0, ended.stderr
    [session] = report["sessions"]
    return json.loads(ended.stdout), session


def test_background_compile_does_not_delay_the_program(run: Run, model: str) -> None:
    said, session = program(run, model, "--on-miss", "background")
    assert (said["providers"], session["outcome"]) == ([CPU], "background"), (
        "nothing is compiled in the program, on whichever execution provider"
    )
    limit = time.monotonic() + 60
    while session["outcome"] == "background" and time.monotonic() < limit:
        time.sleep(0.2)
        said, session = program(run, model, "--on-miss", "background")
    assert (said["providers"][0], session["outcome"]) == (OPENVINO, "hit")


def test_a_claim_is_compiled_once_for_all_processes(run: Run, model: str) -> None:
    said, session = program(run, model, "--on-miss", "claim")
    assert (said["providers"][0], session["outcome"]) == (OPENVINO, "put")
    said, session = program(run, model)
    assert (said["providers"][0], session["outcome"]) == (OPENVINO, "hit")


def test_on_miss_fail_leaves_the_program_unchanged_and_reports_it(run: Run, model: str) -> None:
    said, session = program(run, model, "--on-miss", "fail")
    assert said["providers"] == [CPU] and session["outcome"] == "failed" and session["why"]


def test_the_first_start_of_a_model_without_a_comparison_is_no_hit(
    run: Run, tmp_path: Path
) -> None:
    """It runs with two rows only, and the daemon compares outputs with one."""
    rows = helper.make_tensor("rows", TensorProto.INT64, [2], [2, 8])
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [4, 4], [0.5] * 16)
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["z"]),
        helper.make_node("Reshape", ["z", "rows"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 8])
    body = helper.make_graph(nodes, tmp_path.name, [x], [y], [rows, weight])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(body, opset_imports=opsets, ir_version=8), tmp_path / "rows.onnx")
    code = (
        f"import numpy, onnxruntime; s = onnxruntime.InferenceSession({str(tmp_path)!r} + "
        "'/rows.onnx'); print(s.run(None, {'x': numpy.ones([4, 4], 'f')})[0].sum())"
    )
    outcomes = []
    for _ in range(2):
        ended, report = run.python("-c", code)
        assert ended.stdout == "32.0\n", ended.stderr
        outcomes += [session["outcome"] for session in report["sessions"]]
    assert outcomes == ["compiled", "hit"], report


def test_a_model_that_the_execution_provider_cannot_compile(run: Run, tmp_path: Path) -> None:
    """Its only operator is from a domain unknown to OpenVINO; the program computes as without
    epcache. test_packages.py has a model on which OpenVINO fails.
    """
    node = helper.make_node(
        "LabelEncoder",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        keys_int64s=[1, 2],
        values_strings=["one", "two"],
    )
    x, y = (
        helper.make_tensor_value_info(name, kind, [2])
        for name, kind in (("x", TensorProto.INT64), ("y", TensorProto.STRING))
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 2)]
    onnx.save(
        helper.make_model(
            helper.make_graph([node], "labels", [x], [y]), opset_imports=imports, ir_version=8
        ),
        tmp_path / "labels.onnx",
    )
    model = str(tmp_path / "labels.onnx")
    code = (
        f"import numpy, onnxruntime; s = onnxruntime.InferenceSession({model!r}); "
        f"print(list(s.run(None, {{'x': numpy.array([2, 1])}})[0]))"
    )
    for _ in range(2):
        ended, report = run.python("-c", code)
        assert ended.stdout == "['two', 'one']\n", ended.stderr
        [session] = report["sessions"]
        assert (session["outcome"], session["providers"]) == ("failed", [CPU])
        assert "labels.onnx" in session["why"], session["why"]
