"""Fixtures: a model, and a view of it compiled by OpenVINO's execution provider. Tests import those
that they use.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from providers import OPENVINO, compile_plain, make_model


@pytest.fixture
def source(tmp_path: Path) -> str:
    if reason := OPENVINO.missing():
        pytest.skip(reason)
    return make_model(tmp_path / "model.onnx")


@pytest.fixture
def view(source: str, tmp_path: Path) -> Path:
    compile_plain(OPENVINO, source, tmp_path / "view" / "abc", "x_ctx.onnx")
    return tmp_path / "view"
