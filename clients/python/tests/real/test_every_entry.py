"""Every way to a session, under the oldest ONNX Runtime that there is support for and under a
current one, with each plugin package.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import pytest
from daemon import Daemon

OPENVINO, QNN = "OpenVINOExecutionProvider", "QNNExecutionProvider"
OPTIONS = {
    OPENVINO: {"load_config": json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "f32"}})},
    QNN: {"soc_model": "60", "enable_htp_fp16_precision": "1"},
}


@pytest.mark.parametrize(
    ("name", "version", "ep"),
    [("openvino-1.8.0-ort-1.24.4", "1.24.4", OPENVINO), ("qnn-2.7.0", "1.31.1", QNN)],
)
def test_one_compile_serves_every_way(
    name: str,
    version: str,
    ep: str,
    start: Callable[..., Daemon],
    runtime: Callable[[str], Path],
    models: Any,
) -> None:
    daemon = start(runtime(name))
    arguments = {
        "model": models.entry("tiny-mlp"),
        "path": str(models.path("tiny-mlp")),
        "ep": ep,
        "options": OPTIONS[ep],
    }
    ran = child.run(
        "entries", runtime(name), environment={"EPCACHE_SOCKET": daemon.socket}, **arguments
    )
    assert ran["version"] == version
    assert ran["warnings"] == []
    ways = ran["ways"]
    assert ways.pop("cold")["outcome"] == "miss"
    assert ways.pop("warm")["outcome"] == "compiled"
    assert {way: told["outcome"] for way, told in ways.items()} == dict.fromkeys(ways, "hit")
    assert daemon.compiles() == 1
    sessions = {way: told for way, told in ways.items() if "provider" in told}
    assert {told["provider"] for told in sessions.values()} == {ep}
    computed = [told["outputs"] for told in sessions.values()]
    assert not computed[0][0]["blank"]
    assert computed == [computed[0]] * len(computed)
    plain = child.run(
        "plain",
        runtime(name),
        model=arguments["model"],
        path=arguments["path"],
        ep=ep,
        options=OPTIONS[ep],
        level="basic",
    )
    assert computed[0] == plain["sidecar"]["outputs"], (
        "and it is what plain ONNX Runtime computes with what it compiled itself"
    )
