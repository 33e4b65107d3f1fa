"""External data is found where plain ONNX Runtime finds it, and the model comes from the cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import generate
import numpy as np
import onnx
import pytest
from daemon import Daemon

EP = "OpenVINOExecutionProvider"
EXACT = {"load_config": json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "f32"}})}
WIDTH = 64
NEW, OLD = "openvino-1.8.1", "openvino-1.8.0-ort-1.24.4"  # with ONNX Runtime 1.31.1 and 1.24.4


@pytest.fixture(scope="module")
def daemon(start: Callable[..., Daemon], runtime: Callable[[str], Path]) -> Daemon:
    return start(runtime(NEW), runtime(OLD))


@pytest.fixture(scope="module")
def compilers_elsewhere(start: Callable[..., Daemon], runtime: Callable[[str], Path]) -> Daemon:
    """A daemon without the applications' runtimes, so that they compile under claims."""
    return start(runtime("qnn-2.7.0"))


def spelled(directory: Path, locations: list[str], seed: int = 5, batch: int = 1) -> Path:
    """Writes a model; its tensors use these spellings of file names in rotation."""
    generate.mlp(directory / "model.onnx", width=WIDTH, layers=2, seed=seed, batch=batch)
    model = onnx.load(directory / "model.onnx")
    data = b""
    for number, tensor in enumerate(model.graph.initializer):
        keys = {
            "location": locations[number % len(locations)],
            "offset": str(len(data)),
            "length": str(len(tensor.raw_data)),
        }
        data += tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in keys.items():
            tensor.external_data.add(key=key, value=value)
    (directory / "s").mkdir()
    for name in ("a.bin", "s/a.bin"):
        (directory / name).write_bytes(data)
    onnx.save(model, directory / "model.onnx")
    return directory / "model.onnx"


def sessions(
    where: Path, daemon: Daemon, path: Path, *requests: dict[str, Any], worker: str = ""
) -> Any:
    environment = {"EPCACHE_SOCKET": daemon.socket, "EPCACHE_WORKER": worker}
    return child.run(
        "external",
        where,
        environment=environment,
        ep=[f"{EP}:CPU", EXACT],
        path=str(path),
        width=WIDTH,
        asks=list(requests),
    )


def load_sessions(
    where: Path, daemon: Daemon, path: Path, *requests: dict[str, Any], worker: str = ""
) -> Any:
    found = sessions(where, daemon, path, *requests, worker=worker)
    assert all("error" not in one for one in found), found
    return found


def require_equal(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one["values"], other["values"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", [NEW, OLD])
def test_model_in_memory_with_the_directory_of_its_data(
    version: str, daemon: Daemon, runtime: Callable[[str], Path], tmp_path: Path
) -> None:
    """The example of ONNX Runtime's page on EPContext models."""
    daemon.control("rm", "--all", "--yes")
    path = spelled(tmp_path, ["a.bin", "s/a.bin"])
    one: dict[str, Any] = {"in_memory": True, "directory": str(tmp_path)}
    relative = {**one, "directory": tmp_path.name, "working": str(tmp_path.parent)}
    # ONNX Runtime's own default for bytes
    working: dict[str, Any] = {"in_memory": True, "working": str(tmp_path)}
    plain, first, *hits = load_sessions(
        runtime(version), daemon, path, {**one, "plain": True}, one, one, relative, working, {}
    )
    assert [first["outcome"], *(hit["outcome"] for hit in hits)] == [
        "compiled",
        "hit",
        "hit",
        "hit",
        "hit",
    ], (first, hits)
    for session in (first, *hits):
        assert session["warnings"] == []
        assert session["request_key"] == first["request_key"], (
            "where the bytes came from does not matter"
        )
        require_equal(session, plain)


@pytest.mark.parametrize("version", [NEW, OLD])
def test_external_data_directory_of_a_model_by_path_is_as_in_onnxruntime(
    version: str, daemon: Daemon, runtime: Callable[[str], Path], tmp_path: Path
) -> None:
    """1.28 and later use the directory, earlier versions the model's; the weights there differ."""
    (tmp_path / "model").mkdir()
    (tmp_path / "other").mkdir()
    path = spelled(tmp_path / "model", ["a.bin"], seed=6)
    spelled(tmp_path / "other", ["a.bin"], seed=7)
    one: dict[str, Any] = {"directory": str(tmp_path / "other")}
    plain, beside, cached = load_sessions(
        runtime(version), daemon, path, {**one, "plain": True}, {"plain": True}, one
    )
    require_equal(cached, plain)
    assert cached["outcome"] in ("compiled", "hit"), cached
    assert np.allclose(plain["values"], beside["values"]) == (version == OLD)


@pytest.mark.parametrize("version", [NEW, OLD])
def test_model_in_memory_is_compiled_under_a_claim(
    version: str,
    compilers_elsewhere: Daemon,
    programs: Path,
    runtime: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    path = spelled(tmp_path, ["a.bin", "s/../a.bin"], seed=[NEW, OLD].index(version) + 20)
    one = {"in_memory": True, "directory": str(tmp_path), "on_miss": "claim"}
    made, again, plain = load_sessions(
        runtime(version),
        compilers_elsewhere,
        path,
        one,
        one,
        {**one, "plain": True, "on_miss": "wait"},
        worker=str(programs / "epcached-ort"),
    )
    assert (made["outcome"], again["outcome"]) == ("put", "hit"), made
    assert made["in process"] == (version == OLD), (
        "a worker loads by path, and that version ignores the directory then"
    )
    require_equal(made, plain)
    require_equal(again, plain)


def test_external_data_with_several_spellings_of_one_path(
    daemon: Daemon, runtime: Callable[[str], Path], tmp_path: Path
) -> None:
    path = spelled(tmp_path, ["a.bin", "./a.bin", "s//a.bin", "s/../a.bin"], seed=9)
    plain, first = load_sessions(runtime(NEW), daemon, path, {"plain": True}, {})
    assert first["outcome"] == "compiled", first
    require_equal(first, plain)
    options = [f"--option=load_config={EXACT['load_config']}"]
    (answer,) = daemon.control(
        "get", str(path), "--ep", f"{EP}:CPU", "--runtime", str(runtime(NEW)), *options, "--json"
    )
    assert (answer["outcome"], answer["request_key"]) == ("hit", first["request_key"])


def test_group_shares_a_file_with_several_spellings(
    daemon: Daemon, runtime: Callable[[str], Path], tmp_path: Path
) -> None:
    """OpenVINO keeps the weights in the models' file, and spells its path as the models do."""
    for batch in (1, 2):
        directory = tmp_path / str(batch)
        directory.mkdir()
        spelled(directory, ["./a.bin"], seed=11, batch=batch).rename(tmp_path / f"rows{batch}.onnx")
        (directory / "a.bin").replace(tmp_path / "a.bin")
    requests = [{"path": ["rows1.onnx", "rows2.onnx"], "dims": {}, "options": EXACT}] * 2
    environment = {"EPCACHE_SOCKET": daemon.socket}
    outcomes = child.run(
        "pipeline",
        runtime(NEW),
        environment=environment,
        ep=f"{EP}:CPU",
        directory=str(tmp_path),
        asks=requests,
    )
    assert outcomes == ["compiled", "hit"]


def test_data_outside_the_directory_is_refused_by_client_and_onnxruntime(
    daemon: Daemon, runtime: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    path = spelled(tmp_path / "model", ["s/../../a.bin"], seed=10)
    (tmp_path / "a.bin").write_bytes((tmp_path / "model" / "a.bin").read_bytes())
    for plain in (False, True):
        (one,) = sessions(runtime(NEW), daemon, path, {"plain": plain})
        assert "escapes model directory" in one["error"], one
    refused = daemon.refused("get", str(path), "--ep", f"{EP}:CPU")
    assert "lies outside the model's directory" in refused
