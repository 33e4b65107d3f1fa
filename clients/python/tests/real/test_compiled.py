"""Models that have EPContext nodes already: compiled ones are adopted on request, and wrappers of
OpenVINO's own format are compiled.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
from daemon import Daemon
from onnx import TensorProto, helper

OPENVINO = "OpenVINOExecutionProvider"
EXACT = {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'}
SIZE = 16


def test_a_shipped_model_is_adopted(
    start: Callable[..., Daemon], runtime: Callable[[str], Path], models: Any, tmp_path: Path
) -> None:
    where = runtime("openvino-1.8.1")
    daemon = start(where)
    model = {
        "model": models.entry("silero-vad"),
        "source": str(models.path("silero-vad")),
        "path": str(tmp_path / "vad_ctx.onnx"),
    }
    asked: list[dict[str, Any]] = [{}, {"adopt": True}, {"adopt": True}]
    ran = child.run(
        "compiled",
        where,
        environment={"EPCACHE_SOCKET": daemon.socket},
        ep=OPENVINO,
        options=EXACT,
        asked=asked,
        **model,
    )
    assert ran == {
        "outcomes": ["passthrough", "adopted", "hit"],
        "warnings": [[]] * 3,
        "right": [True] * 3,
    }


def test_an_invalid_model_is_not_adopted(
    start: Callable[..., Daemon], runtime: Callable[[str], Path], models: Any, tmp_path: Path
) -> None:
    """The application's own file is loaded as without a cache."""
    where = runtime("openvino-1.8.1")
    daemon = start(where)
    model = {
        "model": models.entry("silero-vad"),
        "source": str(models.path("silero-vad")),
        "path": str(tmp_path / "vad_ctx.onnx"),
    }
    asked = [{"adopt": True, "store": "none"}]
    ran = child.run(
        "compiled",
        where,
        environment={"EPCACHE_SOCKET": daemon.socket},
        ep=OPENVINO,
        options=EXACT,
        asked=asked,
        **model,
    )
    assert (ran["outcomes"], ran["right"]) == (["passthrough"], [True])
    assert any(w.startswith("not adopted: ") for w in ran["warnings"][0])


def test_a_wrapper_of_openvinos_own_format_is_compiled(
    start: Callable[..., Daemon], runtime: Callable[[str], Path], tmp_path: Path
) -> None:
    where = runtime("openvino-1.8.1")
    daemon = start(where)
    model = {
        "name": "wrapped",
        "dimensions": {},
        "inputs": {"x": {"dtype": "float32", "shape": [1, SIZE], "fill": "normal"}},
    }
    wishes: dict[str, Any] = {
        "model": model,
        "path": write_wrapper(tmp_path),
        "options": EXACT,
        "asked": [{}, {}],
    }
    ran = child.run(
        "compiled", where, environment={"EPCACHE_SOCKET": daemon.socket}, ep=OPENVINO, **wishes
    )
    assert ran == {"outcomes": ["compiled", "hit"], "warnings": [[]] * 2, "right": [True] * 2}


def write_wrapper(directory: Path) -> str:
    """Writes y = Relu(x W) in OpenVINO's own format, and an ONNX model that refers to it, as Olive
    does.
    """
    row, square = f"<dim>1</dim><dim>{SIZE}</dim>", f"<dim>{SIZE}</dim><dim>{SIZE}</dim>"

    def port(number: int, dims: str, name: str = "") -> str:
        names = f' names="{name}"' if name else ""
        return f'<port id="{number}" precision="FP32"{names}>{dims}</port>'

    def layer(number: int, kind: str, data: str, ins: str, outs: str) -> str:
        ends = (f"<input>{ins}</input>" if ins else "") + (
            f"<output>{outs}</output>" if outs else ""
        )
        return (
            f'<layer id="{number}" name="{kind}{number}" type="{kind}" '
            f'version="opset1">{data}{ends}</layer>'
        )

    layers = [
        layer(
            0, "Parameter", f'<data shape="1,{SIZE}" element_type="f32"/>', "", port(0, row, "x")
        ),
        layer(
            1,
            "Const",
            f'<data element_type="f32" shape="{SIZE},{SIZE}" offset="0" size="{4 * SIZE * SIZE}"/>',
            "",
            port(0, square),
        ),
        layer(
            2,
            "MatMul",
            '<data transpose_a="false" transpose_b="false"/>',
            port(0, row) + port(1, square),
            port(2, row),
        ),
        layer(3, "ReLU", "", port(0, row), port(1, row, "y")),
        layer(4, "Result", "", port(0, row), ""),
    ]
    edges = "".join(
        f'<edge from-layer="{a}" from-port="{b}" to-layer="{c}" to-port="{d}"/>'
        for a, b, c, d in ((0, 0, 2, 0), (1, 0, 2, 1), (2, 2, 3, 0), (3, 1, 4, 0))
    )
    xml = (
        '<?xml version="1.0"?><net name="model" '
        f'version="11"><layers>{"".join(layers)}</layers><edges>{edges}</edges></net>'
    )
    (directory / "model.xml").write_text(xml)
    (directory / "model.bin").write_bytes(
        b"".join(struct.pack("<f", (i * 37 % 101 - 50) / 50) for i in range(SIZE * SIZE))
    )
    node = helper.make_node(
        "EPContext",
        ["x"],
        ["y"],
        "ContextNode",
        domain="com.microsoft",
        embed_mode=0,
        main_context=1,
        ep_cache_context="model.xml",
        source=OPENVINO,
        partition_name="model",
        ep_sdk_version="2026.4",
    )
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, SIZE]) for name in "xy"]
    graph = helper.make_graph([node], "graph", values[:1], values[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    path = directory / "wrapper.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    )
    return str(path)
