"""An artefact of epcached has bit for bit the output of one that plain ONNX Runtime compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import pytest
from daemon import Daemon

OPENVINO, QNN = "OpenVINOExecutionProvider", "QNNExecutionProvider"
TARGET = {"soc_model": "60", "enable_htp_fp16_precision": "1"}

# The level with which epcache.InferenceSession compiles, so that it hits the acquired build.
SESSION_LEVEL = "basic"
OPENVINO_MODELS = [
    "silero-vad",
    "magika",
    "rapidocr-cls",
    "rapidocr-det",
    "rapidocr-rec",
    "smart-turn",
    "nudenet",
    "ddddocr-det",
    "ddddocr-old",
    "ddddocr",
    "minilm-int8",
    "minilm-fp32",
    "mlp-128mib",
    "tiny-mlp",
    "tiny-free-dimension",
    "tiny-convolution",
    "tiny-external",
]

# OpenVINO refuses several main contexts in one graph ("Multiple embedded native EPContext main
# contexts are not supported"), so what it compiled in several parts cannot be had embedded by
# conversion.
SEVERAL_PARTS = ["ddddocr-old"]


@pytest.fixture(scope="module")
def daemon(start: Callable[..., Daemon], runtime: Callable[[str], Path]) -> Daemon:
    return start(runtime("openvino-1.8.1"), runtime("qnn-2.7.0"))


def require_equal(
    daemon: Daemon, runtime: Path, models: Any, name: str, ep: str, options: dict[str, str]
) -> None:
    common = {
        "model": models.entry(name),
        "path": str(models.path(name)),
        "ep": ep,
        "options": options,
        "level": SESSION_LEVEL,
    }
    plain = child.run("plain", runtime, **common)
    served = child.run("served", runtime, socket=daemon.socket, runtime=str(runtime), **common)
    for form, expected in plain.items():
        assert expected["providers"][0] == ep
        converted = form == "embedded" and name not in SEVERAL_PARTS
        first = "hit" if converted else "compiled"
        assert served[form]["outcomes"] == [first, "hit", "hit"], form
        assert served[form]["files"] == expected["files"] == {"sidecar": 2, "embedded": 1}[form]
        assert not any(output["blank"] for output in expected["outputs"])
        for way, outputs in served[form]["outputs"].items():
            assert outputs == expected["outputs"], (
                f"{name}, {form}, {way}: other outputs than plain ONNX Runtime's artefact"
            )


@pytest.mark.parametrize("name", OPENVINO_MODELS)
def test_openvino(name: str, daemon: Daemon, runtime: Callable[[str], Path], models: Any) -> None:
    require_equal(daemon, runtime("openvino-1.8.1"), models, name, OPENVINO, {})


def test_openvino_with_a_provider_option(
    daemon: Daemon, runtime: Callable[[str], Path], models: Any
) -> None:
    exact = {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'}
    require_equal(daemon, runtime("openvino-1.8.1"), models, "silero-vad", OPENVINO, exact)


@pytest.mark.parametrize("name", ["tiny-mlp", "tiny-convolution"])
def test_qnn(name: str, daemon: Daemon, runtime: Callable[[str], Path], models: Any) -> None:
    require_equal(daemon, runtime("qnn-2.7.0"), models, name, QNN, TARGET)
