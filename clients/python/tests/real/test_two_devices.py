"""Two devices of equal type, vendor and id, which only their metadata tells apart."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import child
import pytest
from daemon import Daemon

EP = "EpcachedTestExecutionProvider"
LIBRARY = "libonnxruntime_providers_epcachedtest.so"
PROJECT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def where(runtime: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runtime with the test EP, whose two devices are simulated on one processor."""
    if not shutil.which("cc"):
        pytest.skip("NOT TESTED WITH THE TEST EP: no C compiler")
    directory = tmp_path_factory.mktemp("testep")
    directory.chmod(0o755)
    subprocess.run([PROJECT / "testdata/ep/testep/build", directory], check=True)
    installed = runtime("openvino-1.8.1") / "onnxruntime"
    (directory / "onnxruntime").symlink_to(installed)
    (library,) = (installed / "capi").glob("libonnxruntime.so.*")
    (directory / library.name).symlink_to(library)
    return directory


@pytest.mark.parametrize(
    ("wishes", "made"), [({}, "compiled"), ({"on_miss": "claim"}, "put")], ids=["daemon", "claim"]
)
def test_each_device_gets_its_own_artefact(
    wishes: dict[str, Any],
    made: str,
    where: Path,
    start: Callable[..., Daemon],
    models: Any,
    programs: Path,
) -> None:
    (ort,) = where.glob("libonnxruntime.so.*")
    libraries = f'{{ {EP} = "{where / LIBRARY}" }}'
    runtimes = f'[[runtime]]\nort_library = "{ort}"\nep_libraries = {libraries}\n'
    daemon = start(configuration=runtimes)
    arguments = {
        "model": models.entry("tiny-mlp"),
        "path": str(models.path("tiny-mlp")),
        "ep": EP,
        "library": str(where / LIBRARY),
        "wishes": wishes,
    }
    environment = {
        "EPCACHE_SOCKET": daemon.socket,
        "EPCACHE_WORKER": str(programs / "epcached-ort"),
    }
    first = child.run("two_devices", where, environment=environment, **arguments)
    again = child.run("two_devices", where, environment=environment, **arguments)
    assert [one["asked"] for one in first] == ["sim-1", "sim-2"]
    assert [one["outcome"] for one in first] == [made, made], first
    assert [one["outcome"] for one in again] == ["hit", "hit"]
    assert first[0]["build"] != first[1]["build"]
    for one in (*first, *again):
        (build,) = daemon.control("show", one["build"])["builds"]
        content = b"".join(daemon.object_path(f["digest"]).read_bytes() for f in build["files"])
        assert [name for name in ("sim-1", "sim-2") if name.encode() in content] == [one["asked"]]


def device(**metadata: str) -> Any:
    kind = SimpleNamespace(name="GPU")
    hardware = SimpleNamespace(type=kind, vendor_id=1, device_id=2, metadata={"pci": "0"})
    return SimpleNamespace(ep_name="EP", device=hardware, ep_metadata=metadata)


def test_a_device_without_metadata_of_its_own_has_no_selector() -> None:
    pytest.importorskip("onnxruntime")
    from epcache import _devices

    twins = [device(at="a", version="1"), device(at="a", version="1"), device(at="b", version="1")]
    first, second, third = (_devices.selector(one, twins) for one in twins)
    assert first is not None and first.metadata == {}, "the daemon uses the first that fits"
    assert second is None
    assert third is not None and third.metadata == {"at": "b"}
    less = [device(at="a", more="x"), device(at="a")]
    assert _devices.selector(less[1], less) is None, "the first one fits every selector for it"
