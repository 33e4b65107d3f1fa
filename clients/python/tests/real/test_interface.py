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


def branch(name: str, op: str, outer: str = "w") -> onnx.GraphProto:
    nodes = [helper.make_node(op, ["b", outer], [f"{name}1"]), on_the_cpu(f"{name}1", f"{name}2")]
    return helper.make_graph(nodes, name, [], [value(f"{name}2")])


def conditional(then: onnx.GraphProto, to: str = "y") -> onnx.NodeProto:
    return helper.make_node(
        "If", ["c"], [to], then_branch=then, else_branch=branch(f"{then.name}else", "Sub")
    )


def loop() -> onnx.NodeProto:
    nodes = [
        helper.make_node("Add", ["v", "w"], ["v1"]),
        on_the_cpu("v1", "v2"),
        helper.make_node("Identity", ["more"], ["more2"]),
    ]
    scalars = [value("i", TensorProto.INT64, []), value("more", TensorProto.BOOL, [])]
    made = [value("more2", TensorProto.BOOL, []), value("v2")]
    body = helper.make_graph(nodes, "body", [*scalars, value("v")], made)
    return helper.make_node("Loop", ["N", "", "b"], ["y"], body=body)


def scan() -> onnx.NodeProto:
    nodes = [
        helper.make_node("Add", ["s", "row"], ["s1"]),
        on_the_cpu("s1", "s2"),
        helper.make_node("Add", ["s2", "w"], ["s3"]),
        helper.make_node("Identity", ["s3"], ["each"]),
    ]
    body = helper.make_graph(
        nodes,
        "body",
        [value("s"), value("row", shape=[8])],
        [value("s3"), value("each", shape=SHAPE)],
    )
    return helper.make_node("Scan", ["w", "b"], ["y", "all"], body=body, num_scan_inputs=1)


def nested() -> onnx.NodeProto:
    inner = conditional(branch("inner", "Add"), "inner2")
    outer = helper.make_graph(
        [inner, helper.make_node("Neg", ["inner2"], ["outer2"])], "outer", [], [value("outer2")]
    )
    return conditional(outer)


BODIES = {
    "if": lambda: conditional(branch("then", "Add")),
    "loop": loop,
    "scan": scan,
    "nested": nested,
    "constant": lambda: conditional(branch("then", "Add")),
    "read by the provider too": lambda: conditional(branch("then", "Add")),
    "external": lambda: conditional(branch("then", "Add")),
}


# ONNX Runtime 1.24 does not load compiled graphs with these If nodes.
@pytest.mark.parametrize(
    ("version", "kind"),
    [(version, kind) for version in ("openvino-1.8.1", "qnn-2.7.0") for kind in BODIES]
    + [("openvino-1.8.0-ort-1.24.4", kind) for kind in ("loop", "scan")],
)
def test_bodies_that_read_a_constant_of_the_outer_graph(
    version: str, kind: str, daemon: Daemon, runtime: Callable[[str], Path], tmp_path: Path
) -> None:
    w = numpy_helper.from_array(matrix(1), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w" if kind.startswith("read") else "m"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        BODIES[kind](),
    ]
    initializers = [
        numpy_helper.from_array(matrix(2), "m"),
        numpy_helper.from_array(np.array(3, np.int64), "N"),
    ]
    if kind == "constant":
        nodes.insert(0, helper.make_node("Constant", [], ["w"], value=w))
    else:
        initializers.append(w)
    inputs = [value("x")]
    if nodes[-1].op_type == "If":
        inputs.append(value("c", TensorProto.BOOL, []))
    outputs = [value(name, shape=None) for name in nodes[-1].output]
    graph = helper.make_graph(nodes, "a graph", inputs, outputs, initializers)
    path = save(tmp_path / "model.onnx", graph)
    if kind == "external":
        onnx.save(
            onnx.load(path), path, save_as_external_data=True, location="m.bin", size_threshold=0
        )
    feeds = [{"x": matrix(3), "c": np.array(c)} for c in (True, False)]
    if nodes[-1].op_type != "If":
        feeds = [{"x": matrix(3)}]
    require_same(see(version, daemon, runtime, path, *feeds))


def test_constants_inside_bodies_are_onnx_runtimes_limit(
    daemon: Daemon, runtime: Callable[[str], Path], tmp_path: Path
) -> None:
    w = numpy_helper.from_array(matrix(1), "w")
    then = branch("then", "Add")
    then.initializer.append(w)
    other = branch("thenelse", "Sub")
    other.initializer.append(w)
    nodes = [
        helper.make_node("MatMul", ["x", "m"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other),
    ]
    inputs = [value("x"), value("c", TensorProto.BOOL, [])]
    initializers = [numpy_helper.from_array(matrix(2), "m")]
    path = save(
        tmp_path / "model.onnx",
        helper.make_graph(nodes, "a graph", inputs, [value("y")], initializers),
    )
    seen = see("qnn-2.7.0", daemon, runtime, path, {"x": matrix(3), "c": np.array(True)})
    assert seen["first"]["outcome"] == "failed"
    assert "the model is valid, but this ONNX Runtime cannot compile" in seen["first"]["why"]
    assert seen["first"]["session"] == seen["plain"]
