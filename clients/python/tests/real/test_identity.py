"""Identity of requests: with real models, real libraries and several versions of ONNX Runtime."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import epcache
import pytest
from daemon import Daemon

OPENVINO, QNN = "OpenVINOExecutionProvider", "QNNExecutionProvider"
EXACT = {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'}
TARGET = {"soc_model": "60", "enable_htp_fp16_precision": "1"}


@pytest.fixture(scope="module")
def where(runtime: Callable[[str], Path]) -> Path:
    return runtime("openvino-1.8.1")


@pytest.fixture(scope="module")
def daemon(start: Callable[..., Daemon], runtime: Callable[[str], Path], where: Path) -> Daemon:
    return start(where, runtime("qnn-2.7.0"))


@pytest.fixture
def client(daemon: Daemon) -> Any:
    with epcache.Client(daemon.socket, hello_limit=10) as one:
        yield one


@pytest.fixture
def model(models: Any, tmp_path: Path) -> Path:
    """Returns a copy of the model with two files of external data, and its directory."""
    directory = tmp_path / "model"
    shutil.copytree(models.path("tiny-external").parent, directory)
    return directory / "model.onnx"


def key(client: epcache.Client, model: Path, *eps: Any, **wishes: Any) -> str:
    with client.acquire(
        model, list(eps) or [f"{OPENVINO}:CPU"], on_miss="key_only", **wishes
    ) as answer:
        assert answer.outcome == "key" and len(answer.request_key) == 64
        return answer.request_key


def test_only_the_content_of_a_model_counts(
    client: epcache.Client, model: Path, where: Path, tmp_path: Path
) -> None:
    def acquire(path: Path) -> tuple[str, str, str]:
        with client.acquire(path, f"{OPENVINO}:CPU", runtime=str(where)) as artefact:
            return artefact.outcome, artefact.request_key, artefact.build

    outcome, request_key, build = acquire(model)
    assert outcome == "compiled"
    other = tmp_path / "elsewhere" / "deeper"
    shutil.copytree(model.parent, other)
    (other / "model.onnx").rename(other / "another name")
    for file in [other / "another name", other / "first.bin", other / "weights" / "second.bin"]:
        os.utime(file, (1, 1))
        if os.geteuid() == 0:
            os.chown(file, 12345, 12345)
    assert acquire(other / "another name") == ("hit", request_key, build)
    # All files are links, as in caches of model hubs.
    links = tmp_path / "links"
    (links / "weights").mkdir(parents=True)
    for name, target in {
        "model.onnx": "another name",
        "first.bin": "first.bin",
        "weights/second.bin": "weights/second.bin",
    }.items():
        (links / name).symlink_to(other / target)
    assert acquire(links / "model.onnx") == ("hit", request_key, build)


@pytest.mark.parametrize("file", ["first.bin", "weights/second.bin"])
def test_one_changed_weight_byte_in_external_data_is_another_model(
    file: str, client: epcache.Client, model: Path, where: Path
) -> None:
    with client.acquire(model, f"{OPENVINO}:CPU", runtime=str(where)) as artefact:
        before = artefact.request_key
    path = model.parent / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with client.acquire(model, f"{OPENVINO}:CPU", runtime=str(where)) as artefact:
        assert (artefact.outcome, artefact.request_key != before) == ("compiled", True)
    # Bytes that no tensor refers to do not count: the files begin with 64 of them.
    data[0] ^= 1
    data[-1] ^= 1
    path.write_bytes(data)
    with client.acquire(model, f"{OPENVINO}:CPU", runtime=str(where)) as artefact:
        assert (artefact.outcome, artefact.request_key) == ("hit", before)


def test_changed_weights_with_unchanged_file_times(
    client: epcache.Client, model: Path, where: Path
) -> None:
    """A build system may set mtime back, but no program can set ctime."""
    before = key(client, model, runtime=str(where))
    path = model.parent / "first.bin"
    info = path.stat()
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert key(client, model, runtime=str(where)) != before


def test_spellings_of_one_request_have_one_key(
    client: epcache.Client, model: Path, where: Path, runtime: Callable[[str], Path]
) -> None:
    dims = {"a": 1, "b": 2}
    entries = {"session.disable_quant_qdq": "1", "session.x64quantprecision": "1"}

    def openvino(options: dict[str, Any], **more: Any) -> str:
        wishes = {"dims": dims, "session_options": entries, "runtime": str(where), **more}
        return key(client, model, (f"{OPENVINO}:CPU", options), **wishes)

    plain = openvino({"num_of_threads": "2", **EXACT})
    assert plain == openvino({**EXACT, "num_of_threads": "2"})
    assert plain == openvino({**EXACT, "num_of_threads": 2})
    assert plain == openvino(
        {"num_of_threads": "02", "load_config": '{ "CPU" : {"INFERENCE_PRECISION_HINT":"f32"}}'}
    )
    both = {**EXACT, "num_of_threads": "2"}
    assert plain == openvino(both, dims={"b": 2, "a": 1})
    assert plain == openvino(
        both,
        session_options={"session.x64quantprecision": "true", "session.disable_quant_qdq": "True"},
    )
    assert plain == openvino(both, graph_optimization_level="basic")
    assert plain == openvino(both, route="compile_api", embed=False)

    there = str(runtime("qnn-2.7.0"))
    target = key(client, model, (QNN, TARGET), runtime=there)
    spelled = {
        "enable_htp_fp16_precision": True,
        "soc_model": "060",
        "backend_path": "libQnnHtp.so",
    }
    spelled |= {"vtcm_mb": 0, "enable_htp_weight_sharing": "False"}  # the default values
    assert target == key(client, model, (QNN, spelled), runtime=there)
    assert target == key(client, model, (f"{QNN}:CPU", spelled), runtime=there)


def test_every_option_is_part_of_the_key(client: epcache.Client, model: Path, where: Path) -> None:
    wishes: list[tuple[Any, dict[str, Any]]] = [
        (f"{OPENVINO}:CPU", {}),
        ((f"{OPENVINO}:CPU", EXACT), {}),
        ((f"{OPENVINO}:CPU", {"num_of_threads": "1"}), {}),
        ((f"{OPENVINO}:CPU", {"num_of_threads": "2"}), {}),
        (f"{OPENVINO}:CPU", {"dims": {"a": 1}}),
        (f"{OPENVINO}:CPU", {"dims": {"a": 2}}),
        (f"{OPENVINO}:CPU", {"dims_by_denotation": {"a": 1}}),
        (f"{OPENVINO}:CPU", {"session_options": {"session.disable_quant_qdq": "1"}}),
        (f"{OPENVINO}:CPU", {"graph_optimization_level": "disable_all"}),
        (f"{OPENVINO}:CPU", {"graph_optimization_level": "all"}),
        (f"{OPENVINO}:CPU", {"embed": True}),
        (f"{OPENVINO}:CPU", {"route": "session_options"}),
    ]
    keys = [key(client, model, ep, runtime=str(where), **more) for ep, more in wishes]
    assert len(set(keys)) == len(wishes)


def test_one_build_for_several_onnx_runtimes(
    start: Callable[..., Daemon], runtime: Callable[[str], Path], models: Any
) -> None:
    """With the same provider library ONNX Runtime's version does not matter; and provider 1.8.0
    states that it loads builds of 1.8.1.
    """
    newer, older, other = (
        runtime(f"openvino-{name}") for name in ("1.8.1", "1.8.1-ort-1.28.0", "1.8.0-ort-1.28.0")
    )
    daemon = start(newer, older, other)

    def application(directory: Path, times: int) -> tuple[str, list[Any]]:
        result = child.run(
            "sessions",
            directory,
            environment={"EPCACHE_SOCKET": daemon.socket},
            times=times,
            model=models.entry("tiny-external"),
            path=str(models.path("tiny-external")),
            ep=(f"{OPENVINO}:CPU", EXACT),
        )
        return result["version"], result["sessions"]

    version, (made, again) = application(newer, 2)
    assert (version, made["outcome"], again["outcome"]) == ("1.31.1", "compiled", "hit")
    version, (foreign,) = application(older, 1)
    assert (version, foreign["outcome"], foreign["build"]) == ("1.28.0", "hit", made["build"])
    assert daemon.compiles() == 1
    version, (changed,) = application(other, 1)
    assert (version, changed["outcome"], changed["build"]) == ("1.28.0", "hit", made["build"])
    assert daemon.compiles() == 1
    _, (back,) = application(older, 1)
    assert (back["outcome"], back["build"]) == ("hit", made["build"])
    for session in (again, foreign, changed, back):
        assert session["executed by"] == [OPENVINO]
        assert session["values"] == made["values"] and not made["outputs"][0]["blank"]


def test_library_replaced_and_put_back_under_a_running_daemon(
    start: Callable[..., Daemon], where: Path, models: Any, tmp_path: Path
) -> None:
    """Another byte at the library's end changes its digest, but not its version. Existing builds
    are judged for the new library, and not served as its own.
    """
    directory = tmp_path / "runtime"
    shutil.copytree(where, directory, symlinks=True, copy_function=link_or_copy)
    library = directory / "onnxruntime_ep_openvino" / "libonnxruntime_providers_openvino_plugin.so"
    changed = tmp_path / "changed"
    changed.write_bytes(library.read_bytes() + b"\0")
    original = tmp_path / "original"
    link_or_copy(library, original)
    daemon = start(directory)
    with epcache.Client(daemon.socket, hello_limit=10) as client:

        def acquire(on_miss: str = "wait") -> tuple[str, str, str]:
            asked = {"runtime": str(directory), "on_miss": on_miss}
            with client.acquire(models.path("tiny-mlp"), f"{OPENVINO}:CPU", **asked) as artefact:
                assert artefact.compatibility == "optimal", artefact
                return artefact.outcome, artefact.build, artefact.compatibility_source

        outcome, first, source = acquire()
        assert (outcome, source) == ("compiled", "same library")
        assert acquire() == ("hit", first, "same library")
        changed.replace(library)
        assert acquire() == ("hit", first, "execution provider")
        outcome, second, source = acquire("refresh")
        assert (outcome, source) == ("compiled", "same library") and second != first
        assert acquire() == ("hit", second, "same library"), "its own comes first"
        original.replace(library)
        assert acquire() == ("hit", first, "same library")


def link_or_copy(source: Any, target: Any) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def test_changed_weight_changes_the_next_sessions_output(
    daemon: Daemon, where: Path, model: Path, models: Any
) -> None:
    """An application changes a weight in place, and the next session uses the new one."""

    def session() -> Any:
        arguments = {
            "model": models.entry("tiny-external"),
            "path": str(model),
            "ep": (f"{OPENVINO}:CPU", EXACT),
        }
        return child.run(
            "sessions", where, environment={"EPCACHE_SOCKET": daemon.socket}, **arguments
        )["sessions"][0]

    before = session()
    path = model.parent / "weights" / "second.bin"
    data = bytearray(path.read_bytes())
    # every weight changes its sign
    data[64 + 3 :: 4] = bytes(byte ^ 0x80 for byte in data[64 + 3 :: 4])
    path.write_bytes(data)
    after, again = session(), session()
    assert after["outcome"] == "compiled" and again["outcome"] == "hit"
    assert before["values"] != after["values"] == again["values"]
