"""epcachectl run: compiles of ONNX Runtime's ModelCompiler come from the cache, as files that the
program loads without it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from daemon import Daemon
from running import OPENVINO, PROGRAMS, Run, plain_environment, python

QNN = "QNNExecutionProvider"
LIBRARIES = {
    OPENVINO: "onnxruntime_ep_openvino/libonnxruntime_providers_openvino_plugin.so",
    QNN: "onnxruntime_qnn/libonnxruntime_providers_qnn.so",
}


def compile_in(run: Run, source: Any, directory: Path, way: str, ep: str = OPENVINO) -> Any:
    """Returns what the program says with and without epcachectl run, and the report of its
    compile.
    """
    options = {"soc_model": "60", "backend_type": "htp"} if ep == QNN else {}
    said = []
    report: dict[str, Any] = {}
    for name in ("plain", "cached"):
        (directory / name).mkdir(exist_ok=True)
        line: list[Any] = [PROGRAMS / "compiler.py", ep, Path(run.runtime) / LIBRARIES[ep]]
        line += [source, directory / name / "small.onnx", way, json.dumps(options)]
        if name == "plain":
            plain = plain_environment(PYTHONPATH=run.runtime)
            ended = subprocess.run([python(), *line], env=plain, capture_output=True, text=True)
        else:
            ended, report = run.python(*line, flags=())
        assert ended.returncode == 0, ended.stderr
        said.append(json.loads(ended.stdout.splitlines()[-1]))
    [compiled] = [one for one in report["sessions"] if one["kind"] == "compile"]
    return said, compiled


@pytest.mark.parametrize("way", ["file", "bytes", "stream"])
def test_compiles_come_from_the_cache(run: Run, models: Any, tmp_path: Path, way: str) -> None:
    source = shutil.copy(models.path("tiny-mlp"), tmp_path / "in.onnx")
    for outcomes in (("compiled", "hit"), ("hit",)):
        (plain, cached), report = compile_in(run, source, tmp_path, way)
        assert report["outcome"] in outcomes, report
        assert cached["files"] == plain["files"]
        assert cached["output"] == pytest.approx(plain["output"], rel=1e-2, abs=1e-3)


def test_a_binary_has_the_name_that_onnxruntime_gives_it(
    start: Callable[..., Daemon],
    runtime: Callable[[str], Path],
    programs: Path,
    models: Any,
    tmp_path: Path,
) -> None:
    where = runtime("qnn-2.7.0")
    run = Run(programs, where, start(where).socket)
    (plain, cached), report = compile_in(run, models.path("tiny-mlp"), tmp_path, "file", QNN)
    assert report["outcome"] == "compiled", report
    assert cached["files"] == plain["files"] == ["small.onnx", "small_qnn.bin"]
    sizes = {(tmp_path / one / "small_qnn.bin").stat().st_size for one in ("plain", "cached")}
    assert len(sizes) == 1
    [node] = onnx.load(tmp_path / "cached" / "small.onnx").graph.node
    [named] = [one.s for one in node.attribute if one.name == "ep_cache_context"]
    assert named == b"small_qnn.bin"


def test_unsupported_compiles_are_onnxruntimes_own(run: Run, models: Any, tmp_path: Path) -> None:
    (plain, cached), report = compile_in(run, models.path("tiny-mlp"), tmp_path, "unknown")
    assert cached == plain
    assert report["outcome"] == "bypassed" and "external_initializers_file_path" in report["why"]
