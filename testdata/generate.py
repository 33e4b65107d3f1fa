"""Small generated models, the same bytes every time, for cases that the real models do not have."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# The versions of ONNX Runtime 1.24, the oldest supported one.
OPSET, IR_VERSION = 17, 9


def mlp(path: Path, width: int, layers: int, seed: int = 0, batch: int | str = 1) -> None:
    """Writes `layers` square layers of MatMul, Add and Relu in fp32: width * width * 4 bytes of
    weights each.

    Every seed gives a model of the same shape and size with other weights.
    """
    random = np.random.default_rng(seed)
    nodes, weights, value = [], [], "x"
    for layer in range(layers):
        # Scaled so that values neither vanish nor overflow over many layers.
        weight = random.standard_normal((width, width), dtype=np.float32) * np.float32(
            np.sqrt(2 / width)
        )
        weights.append(numpy_helper.from_array(weight, f"weight{layer}"))
        weights.append(
            numpy_helper.from_array(random.standard_normal(width, dtype=np.float32), f"bias{layer}")
        )
        nodes.append(helper.make_node("MatMul", [value, f"weight{layer}"], [f"product{layer}"]))
        nodes.append(helper.make_node("Add", [f"product{layer}", f"bias{layer}"], [f"sum{layer}"]))
        value = "y" if layer == layers - 1 else f"hidden{layer}"
        nodes.append(helper.make_node("Relu", [f"sum{layer}"], [value]))
    _save(path, nodes, weights, [batch, width], [batch, width])


def convolution(path: Path) -> None:
    """Writes a convolution, a Relu and a global average: an image model in a few kilobytes."""
    random = np.random.default_rng(3)
    weights = [
        numpy_helper.from_array(random.standard_normal((8, 3, 3, 3), dtype=np.float32), "kernel")
    ]
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["features"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["features"], ["active"]),
        helper.make_node("GlobalAveragePool", ["active"], ["y"]),
    ]
    _save(path, nodes, weights, [1, 3, 32, 32], [1, 8, 1, 1])


def external(directory: Path) -> None:
    """Writes an MLP with its weights in two other files, one of them in a subdirectory."""
    mlp(directory / "model.onnx", width=64, layers=2, seed=5)
    model = onnx.load(directory / "model.onnx")
    (directory / "weights").mkdir(exist_ok=True)
    for number, tensor in enumerate(
        t for t in model.graph.initializer if t.name.startswith("weight")
    ):
        location = ["first.bin", "weights/second.bin"][number]
        data = tensor.raw_data
        # Not at offset 0, so that a reader that ignores the offset is noticed.
        (directory / location).write_bytes(bytes(64) + data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "64"), ("length", str(len(data)))):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
    (directory / "model.onnx").write_bytes(model.SerializeToString())


def causal(path: Path) -> None:
    """Writes one layer of attention with its keys and values as inputs and outputs, as in language
    models.
    """
    width, heads, head, vocabulary = 16, 2, 8, 32
    random = np.random.default_rng(4)
    shapes = {
        "embedding": (vocabulary, width),
        "q": (width, width),
        "k": (width, width),
        "v": (width, width),
        "head": (width, vocabulary),
    }
    weights = [
        numpy_helper.from_array(
            random.standard_normal(shape, dtype=np.float32) * np.float32(0.2), name
        )
        for name, shape in shapes.items()
    ]
    weights += [
        numpy_helper.from_array(np.array(shape, np.int64), name)
        for name, shape in (("split", [0, 0, heads, head]), ("merge", [0, 0, width]))
    ]
    node = helper.make_node
    nodes = [node("Gather", ["embedding", "input_ids"], ["x"])]
    for part in "qkv":
        nodes += [
            node("MatMul", ["x", part], [f"{part}0"]),
            node("Reshape", [f"{part}0", "split"], [f"{part}1"]),
            node("Transpose", [f"{part}1"], [f"{part}2"], perm=[0, 2, 1, 3]),
        ]
    nodes += [
        node("Concat", ["past_key_values.0.key", "k2"], ["present.0.key"], axis=2),
        node("Concat", ["past_key_values.0.value", "v2"], ["present.0.value"], axis=2),
        node("Transpose", ["present.0.key"], ["keys"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q2", "keys"], ["scores"]),
        node("Softmax", ["scores"], ["shares"], axis=-1),
        node("MatMul", ["shares", "present.0.value"], ["mixed"]),
        node("Transpose", ["mixed"], ["mixed1"], perm=[0, 2, 1, 3]),
        node("Reshape", ["mixed1", "merge"], ["mixed2"]),
        node("MatMul", ["mixed2", "head"], ["logits"]),
    ]
    value = helper.make_tensor_value_info
    past = [
        value(f"past_key_values.0.{kind}", TensorProto.FLOAT, ["batch", heads, "past", head])
        for kind in ("key", "value")
    ]
    present = [
        value(f"present.0.{kind}", TensorProto.FLOAT, ["batch", heads, "all", head])
        for kind in ("key", "value")
    ]
    graph = helper.make_graph(
        nodes,
        "causal",
        [value("input_ids", TensorProto.INT64, ["batch", "tokens"]), *past],
        [value("logits", TensorProto.FLOAT, ["batch", "tokens", vocabulary]), *present],
        weights,
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="epcached testdata",
    )
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


def _save(path: Path, nodes: list, weights: list, in_shape: list, out_shape: list) -> None:
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, in_shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, out_shape)],
        weights,
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="epcached testdata",
    )
    onnx.checker.check_model(model)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(model.SerializeToString())
    temporary.replace(path)
