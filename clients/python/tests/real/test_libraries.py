"""Plugins whose libraries lie beside them without a run path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[4]
BUILD = PROJECT / "testdata" / "ep" / "testep" / "build"

REGISTER = """
import sys, epcache
from epcache import _plugins
ep = epcache.ExecutionProvider("EpcachedTestExecutionProvider", library=sys.argv[1])
print(len(_plugins.plugin(ep).devices))
"""


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("split")
    subprocess.run([BUILD, directory, "split"], check=True, capture_output=True)
    return directory


def test_a_session_loads_the_libraries_beside_a_plugin(
    split: Path, tmp_path: Path, runtime: Callable[[str], Path]
) -> None:
    onnxruntime = runtime("openvino-1.8.1")
    # The application's environment leads to the libraries that a plugin opens by name.
    tmp_path.joinpath("libepcachedtest_parts.so").symlink_to(split / "libepcachedtest_parts.so.3.1")
    child = subprocess.run(
        [sys.executable, "-c", REGISTER, split / "libonnxruntime_providers_epcachedtest.so"],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(tmp_path),
            "PYTHONPATH": f"{onnxruntime}:{PROJECT / 'clients' / 'python'}",
        },
    )
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) > 0
