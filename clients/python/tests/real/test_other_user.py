"""Another user than the daemon's loads a view by its descriptor, but cannot open other views with
it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import child
import epcache
import pytest
from daemon import Daemon

OPENVINO, QNN = "OpenVINOExecutionProvider", "QNNExecutionProvider"
CASES: dict[str, tuple[str, str, dict[str, str]]] = {
    "openvino": ("openvino-1.8.1", OPENVINO, {}),
    "qnn": ("qnn-2.7.0", QNN, {"soc_model": "60", "enable_htp_fp16_precision": "1"}),
}

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user: run `make test` as root"
)


@pytest.fixture(scope="module")
def daemon(start: Callable[..., Daemon], runtime: Callable[[str], Path]) -> Daemon:
    return start(runtime("openvino-1.8.1"), runtime("qnn-2.7.0"))


@pytest.fixture(scope="module")
def reachable(runtime: Callable[[str], Path]) -> Iterator[Callable[[str], Path]]:
    """Copies runtimes to a directory that every user may read, because OpenVINO reads its own
    directory at each load, and the project's may be closed.
    """
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)

        def copied(name: str) -> Path:
            there = Path(directory) / name
            if not there.exists():
                shutil.copytree(runtime(name), there, symlinks=True)
            return there

        yield copied


@pytest.mark.parametrize("case", CASES)
def test_another_user_loads_by_descriptor_and_reads_no_other_file(
    case: str,
    daemon: Daemon,
    runtime: Callable[[str], Path],
    reachable: Callable[[str], Path],
    models: Any,
) -> None:
    """The daemon's directories are closed to other users, which is the default."""
    name, ep, options = CASES[case]
    where = runtime(name)
    path = str(models.path("tiny-mlp"))
    plain = child.run(
        "plain",
        where,
        model=models.entry("tiny-mlp"),
        path=path,
        ep=ep,
        options=options,
        level="basic",
    )
    wishes: dict[str, Any] = {"eps": (f"{ep}:CPU", options), "runtime": str(where)}
    with epcache.Client(daemon.socket, hello_limit=10) as client:
        with (
            client.acquire(path, **wishes) as held,
            client.acquire(models.path("tiny-convolution"), **wishes) as other,
        ):
            assert held.fd is not None and len(held.files) == 2, "a graph and its sidecar"
            scope = os.path.dirname(other.view)
            assert os.path.dirname(held.view) == scope, "or they are no siblings"
            result = child.run(
                "other_user",
                reachable(name),
                descriptors=[held.fd],
                model=models.entry("tiny-mlp"),
                ep=ep,
                options=options,
                fd=held.fd,
                graph=held.graph,
                provider_options=held.provider_options[ep],
                sibling={"scope": scope, "view": other.view, "graph": other.graph},
            )
    assert result["user"] == [65534] * 3
    assert result["providers"][0] == ep
    assert result["outputs"] == plain["sidecar"]["outputs"]
    assert result["listed"] == [os.path.dirname(held.graph)]
    # The attempts are valid, because root succeeds with each of them.
    assert set(result["as root"].values()) == {"reached"}, result["as root"]
    assert set(result["as nobody"].values()) == {"EACCES"}, result["as nobody"]
    assert set(result["writes"].values()) <= {"EACCES", "EPERM"}, result["writes"]


def test_another_user_may_not_stop_the_daemon(start: Callable[..., Daemon], programs: Path) -> None:
    own = start()
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        control = shutil.copy(programs / "epcachectl", directory)
        command = [control, "stop", "--socket", own.socket]
        done = subprocess.run(
            command, user=65534, group=65534, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 7, done.stderr
    assert "only uid 0 and administrators may stop this daemon" in done.stderr
    assert own.control("stop")["started_by"] == ""
    assert own.stop() == 0


def test_path_access_opens_the_shared_scope_and_no_more(
    start: Callable[..., Daemon],
    runtime: Callable[[str], Path],
    reachable: Callable[[str], Path],
    models: Any,
    tmp_path: Path,
) -> None:
    """Another user who knows a shared view's name may load by path, but cannot list names or open
    private views.
    """
    where = runtime("openvino-1.8.1")
    daemon = start(where, configuration="path_access = true")
    private = tmp_path / "private.onnx"
    private.write_bytes(models.path("tiny-convolution").read_bytes())
    private.chmod(0o600)
    with epcache.Client(daemon.socket, hello_limit=10) as client:
        wishes: dict[str, Any] = {"eps": f"{OPENVINO}:CPU", "runtime": str(where)}
        with (
            client.acquire(models.path("tiny-mlp"), **wishes) as shared,
            client.acquire(private, **wishes) as own,
        ):
            results = [
                child.run(
                    "other_user",
                    reachable("openvino-1.8.1"),
                    descriptors=[shared.fd],
                    model=models.entry("tiny-mlp"),
                    ep=OPENVINO,
                    options={},
                    fd=shared.fd,
                    graph=shared.graph,
                    provider_options=shared.provider_options[OPENVINO],
                    sibling={
                        "scope": os.path.dirname(view.view),
                        "view": view.view,
                        "graph": view.graph,
                    },
                )["as nobody"]
                for view in (shared, own)
            ]
    names = ("open by name", "list the scope by name", "list fd/..")
    assert [results[0][name] for name in names] == ["reached", "EACCES", "EACCES"]
    assert [results[1][name] for name in names] == ["EACCES", "EACCES", "EACCES"]
