"""Models of a pipeline, each with its own options, are warmed by one call; the application's
sessions are hits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import child
import generate
from daemon import Daemon

EP = "OpenVINOExecutionProvider"
EXACT = {"load_config": json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "f32"}})}
PIPELINE = """
ep = ["OpenVINOExecutionProvider:CPU"]
options = { load_config = '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}' }

[[model]]
path = "free.onnx"
dims = { batch = 4 }

[[model]]
path = "two.onnx"
options = { num_streams = 2 }

[[group]]
models = ["rows1.onnx", "rows2.onnx"]
optimization_level = "basic"  # as epcache.SessionGroup asks
"""


def test_warmed_pipeline_serves_its_application(
    start: Callable[..., Daemon], runtime: Callable[[str], Path], tmp_path: Path
) -> None:
    where = runtime("openvino-1.8.1")
    daemon = start(where)
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    for name, batch in (("free", "batch"), ("two", 2), ("rows1", 1), ("rows2", 2), ("other", 3)):
        generate.mlp(tmp_path / f"{name}.onnx", width=64, layers=2, seed=3, batch=batch)
    flags = ["--ep", f"{EP}:CPU", "--option", f"load_config={EXACT['load_config']}"]
    warmed = daemon.control(
        "warm", str(tmp_path), "--pipeline", str(tmp_path / "pipeline.toml"), "--follow", *flags
    )
    assert sorted(Path(one["model"]).stem for one in warmed) == [
        "free",
        "other",
        "rows1",
        "rows2",
        "two",
    ]
    assert {one["outcome"] for one in warmed} == {"compiled"}, warmed
    compiles = daemon.compiles()
    asks = [
        {"path": "free.onnx", "dims": {"batch": 4}, "options": EXACT},
        {"path": "two.onnx", "dims": {}, "options": {**EXACT, "num_streams": "2"}},
        {"path": "other.onnx", "dims": {}, "options": EXACT},
        {"path": ["rows1.onnx", "rows2.onnx"], "dims": {}, "options": EXACT},
    ]
    outcomes = child.run(
        "pipeline",
        where,
        environment={"EPCACHE_SOCKET": daemon.socket},
        ep=f"{EP}:CPU",
        directory=str(tmp_path),
        asks=asks,
    )
    assert outcomes == ["hit"] * 4
    assert daemon.compiles() == compiles
