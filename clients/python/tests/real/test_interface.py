"""A program sees the same model with and without epcached, and may override its initializers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import numpy as np
import onnx
import pytest
from daemon import Daemon
from onnx import TensorProto, helper, numpy_helper

OPENVINO, QNN = "OpenVINOExecutionProvider", "QNNExecutionProvider"
OPTIONS = {
    OPENVINO: {"load_config": json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "f32"}})},
    QNN: {"soc_model": "60", "enable_htp_fp16_precision": "1"},
}
RUNTIMES = {"openvino-1.8.1": OPENVINO, "openvino-1.8.0-ort-1.24.4": OPENVINO, "qnn-2.7.0": QNN}
SHAPE = [8, 8]


@pytest.fixture(scope="module")
def daemon(start: Callable[..., Daemon], runtime: Callable[[str], Path]) -> Daemon:
    return start(*map(runtime, RUNTIMES))


def value(name: str, kind: int = TensorProto.FLOAT, shape: Any = SHAPE) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def matrix(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def on_the_cpu(source: str, to: str) -> onnx.NodeProto:
    """A node that neither execution provider takes."""
    return helper.make_node("Inverse", [source], [to], domain="com.microsoft")


def save(path: Path, graph: onnx.GraphProto, **about: Any) -> Path:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, **about)
    helper.set_model_props(model, {"labels": "a,b", "stride": "32"})
    onnx.save(model, path)
    return path


def see(
    version: str, daemon: Daemon, runtime: Callable[[str], Path], path: Path, *feeds: dict[str, Any]
) -> Any:
    ep = RUNTIMES[version]
    daemon.control("rm", "--all", "--yes")  # libraries may load each other's builds
    return child.run(
        "interface",
        runtime(version),
        environment={"EPCACHE_SOCKET": daemon.socket},
        ep=ep,
        options=OPTIONS[ep],
        path=str(path),
        feeds=[{name: np.asarray(v).tolist() for name, v in feed.items()} for feed in feeds],
    )


def require_same(seen: Any) -> None:
    assert (seen["first"]["outcome"], seen["second"]["outcome"]) == ("compiled", "hit"), seen
    assert seen["first"]["session"] == seen["plain"]
    assert seen["second"]["session"] == seen["plain"]


# With OpenVINO, plain ONNX Runtime makes no session of a model whose k the provider would read.
@pytest.mark.parametrize(
    ("version", "reader"),
    [(version, "the CPU") for version in RUNTIMES]
    + [("qnn-2.7.0", "the provider"), ("qnn-2.7.0", "both")],
)
def test_overridable_initializers_and_description(
    version: str, reader: str, daemon: Daemon, runtime: Callable[[str], Path], tmp_path: Path
) -> None:
    nodes = [helper.make_node("MatMul", ["x", "m"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    if reader in ("the provider", "both"):
        nodes[0].input[1] = "k"
    if reader in ("the CPU", "both"):
        nodes += [on_the_cpu("k", "c"), helper.make_node("MatMul", ["b", "c"], ["y"])]
    else:
        nodes[1].output[0] = "y"
    graph = helper.make_graph(
        nodes,
        "a graph",
        [value("k"), value("x")],
        [value("y")],
        [numpy_helper.from_array(matrix(1), "m"), numpy_helper.from_array(matrix(2), "k")],
        doc_string="of a graph",
    )
    path = save(
        tmp_path / "model.onnx",
        graph,
        producer_name="pytorch",
        producer_version="2.9",
        domain="org.acme",
        model_version=7,
        doc_string="a model",
    )
    x = {"x": matrix(3)}
    seen = see(version, daemon, runtime, path, x, {**x, "k": matrix(4)})
    require_same(seen)
    assert seen["plain"]["version"] == 7 and seen["plain"]["description"] == "a model"
    assert [name for name, *_ in seen["plain"]["overridable"]] == ["k"]
    default, overridden = seen["plain"]["computed"]
    assert default != overridden
