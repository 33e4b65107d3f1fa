"""The execution providers that the session tests run on, and models made by plain ONNX Runtime for
comparison.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ort = pytest.importorskip(
    "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
)

import epcache  # noqa: E402
import numpy as np  # noqa: E402
from epcache import _plugins  # noqa: E402

# On some processors OpenVINO computes in bf16 by default, and outputs would differ.
F32 = json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "f32"}})
RUN_LEVEL = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC


class Provider(NamedTuple):
    name: str
    package: str
    options: dict[str, str]

    @property
    def spec(self) -> tuple[str, dict[str, str]]:
        return (f"{self.name}:CPU", self.options)

    def missing(self) -> str:
        """Returns why it cannot be used on this machine, "" if it can."""
        try:
            importlib.import_module(self.package)
        except ImportError:
            return f"{self.package} is in no directory of EPCACHED_RUNTIMES"
        try:
            _plugins.plugin(epcache.ExecutionProvider(self.name))
        except epcache.Unavailable as error:
            return str(error)
        return ""

    def plain_options(self) -> Any:
        """Returns plain ONNX Runtime's options for it, made without the code under test."""
        options = ort.SessionOptions()
        devices = [d for d in ort.get_ep_devices() if d.ep_name == self.name][:1]
        package = importlib.import_module(self.package)
        more = (
            {"backend_path": str(Path(package.get_library_path()).with_name("libQnnHtp.so"))}
            if "qnn" in self.package
            else {}
        )
        options.add_provider_for_devices(devices, {**self.options, **more})
        return options


OPENVINO = Provider("OpenVINOExecutionProvider", "onnxruntime_ep_openvino", {"load_config": F32})
QNN = Provider(
    "QNNExecutionProvider", "onnxruntime_qnn", {"soc_model": "60", "enable_htp_fp16_precision": "1"}
)
PROVIDERS = [pytest.param(OPENVINO, id="openvino"), pytest.param(QNN, id="qnn")]


def make_model(path: Path, seed: int = 0) -> str:
    """Writes a small MLP. Each seed gives other weights, so another output for the same input."""
    import generate

    generate.mlp(path, width=64, layers=2, seed=seed)
    return str(path)


def compile_plain(
    provider: Provider,
    source: str,
    directory: Path,
    name: str = "0123456789abcdef_ctx.onnx",
    **more: Any,
) -> Path:
    """Compiles as an application without epcached."""
    directory.mkdir(parents=True, exist_ok=True)
    compiler = ort.ModelCompiler(
        provider.plain_options(), source, graph_optimization_level=RUN_LEVEL, **more
    )
    compiler.compile_to_file(str(directory / name))
    return directory / name


def run_plain(
    provider: Provider, path: Path | str, inputs: dict[str, Any] | None = None
) -> list[Any]:
    session = ort.InferenceSession(str(path), provider.plain_options(), enable_fallback=0)
    return session.run(None, inputs or INPUTS)


INPUTS = {"x": np.random.default_rng(42).standard_normal((1, 64)).astype(np.float32)}


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a, b) for a, b in zip(one, other, strict=True)
    )
