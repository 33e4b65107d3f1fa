"""The same program in every situation of a daemon: the right result on the same execution provider,
in bounded time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import child
import inputs
import numpy as np
import pytest
import reference
from daemon import Daemon

EP = "OpenVINOExecutionProvider"
EXACT = {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'}
MODEL = "tiny-mlp"
# seconds for one session on a busy machine; waiting for a daemon that does not answer would take
# minutes
LIMIT = 100.0

NewSession = Callable[..., dict[str, Any]]


class Place:
    """The daemon, model and directories of a situation."""

    def __init__(
        self,
        start: Callable[..., Daemon],
        first: Path,
        other: Path,
        new_session: NewSession,
        scratch: Path,
    ) -> None:
        # The runtime is a link, like a system's SDK that can be switched.
        self.runtime, self.other, self.scratch = scratch / "runtime", other, scratch
        self.runtime.symlink_to(first)
        self.daemon = start(self.runtime)
        self._new_session = new_session

    def session(self, **more: Any) -> dict[str, Any]:
        return self._new_session(self.runtime, more.pop("socket", self.daemon.socket), **more)

    @contextlib.contextmanager
    def when_compiling(self, do: Callable[[], None]) -> Iterator[None]:
        """Calls a function as soon as the daemon compiles."""

        def watch() -> None:
            until = time.monotonic() + 30
            while time.monotonic() < until and not self.daemon.control("jobs")["jobs"]:
                time.sleep(0.002)
            do()

        watcher = threading.Thread(target=watch)
        watcher.start()
        yield
        watcher.join()


@contextlib.contextmanager
def mounted(*arguments: str | Path) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can mount")
    subprocess.run(["mount", *arguments], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", arguments[-1]], check=True)


def miss(place: Place) -> dict[str, Any]:
    return place.session()


def hit(place: Place) -> dict[str, Any]:
    place.session()
    return place.session()


def background(place: Place) -> dict[str, Any]:
    return place.session(on_miss="background")


def missing_socket(place: Place) -> dict[str, Any]:
    return place.session(socket=str(place.scratch / "missing"))


def no_socket(place: Place) -> dict[str, Any]:
    """The file at the path is not a socket."""
    path = place.scratch / "file"
    path.write_bytes(b"")
    path.chmod(0)
    return place.session(socket=str(path))


def stopped(place: Place) -> dict[str, Any]:
    place.daemon.freeze()
    try:
        return place.session(hello=None)
    finally:
        place.daemon.thaw()


def stopped_while_it_compiles(place: Place) -> dict[str, Any]:
    """The client checks after 5 s of silence that the daemon is alive, with a timeout of 2 s."""
    try:
        with place.when_compiling(place.daemon.freeze):
            return place.session(hello=None)
    finally:
        place.daemon.thaw()


def killed_while_it_compiles(place: Place) -> dict[str, Any]:
    with place.when_compiling(place.daemon.kill):
        session = place.session()
    place.daemon.start()
    return session


def restarted_while_it_compiles(place: Place) -> dict[str, Any]:
    def restart() -> None:
        place.daemon.kill()
        place.daemon.start()

    with place.when_compiling(restart):
        return place.session()


def full_store(place: Place) -> dict[str, Any]:
    assert place.daemon.stop() == 0
    with mounted("-t", "tmpfs", "-o", "size=8m,mode=0700", "none", place.daemon.state):
        place.daemon.start()
        with (
            contextlib.suppress(OSError),
            open(place.daemon.state / "filler", "wb", buffering=0) as filler,
        ):
            while True:
                filler.write(bytes(4096))
        session = place.session()
        place.daemon.stop()
    place.daemon.start()
    return session


def read_only_store(place: Place) -> dict[str, Any]:
    """A daemon does not start with it; its builds can be read with epcachectl get --state, see
    test_image.py.
    """
    place.session()
    assert place.daemon.stop() == 0
    with mounted("--bind", place.daemon.state, place.daemon.state):
        subprocess.run(["mount", "-o", "remount,bind,ro", place.daemon.state], check=True)
        with contextlib.suppress(AssertionError):
            place.daemon.start()
        session = place.session()
        place.daemon.stop()
    place.daemon.start()
    return session


def sdk_switched(place: Place) -> dict[str, Any]:
    place.session()
    following = place.scratch / "following"
    following.symlink_to(place.other)
    following.rename(place.runtime)
    return place.session()


ANY = {"hit", "compiled", "waited", "no daemon", "failed"}
SITUATIONS: list[tuple[Callable[[Place], dict[str, Any]], set[str], int]] = [
    (miss, {"compiled"}, 0),
    (hit, {"hit"}, 0),
    (background, {"background"}, 0),
    (missing_socket, {"no daemon"}, 1),
    (no_socket, {"no daemon"}, 1),
    (stopped, {"no daemon"}, 1),
    (stopped_while_it_compiles, {"no daemon", "failed"}, 1),
    (killed_while_it_compiles, {"no daemon", "failed"}, 1),
    (restarted_while_it_compiles, ANY, 1),
    (full_store, {"failed"}, 1),
    (read_only_store, {"no daemon"}, 1),
    (
        sdk_switched,
        {"hit", "compiled", "waited"},
        0,
    ),  # waited: the change of the runtime has started the compile
]


@pytest.fixture
def new_session(models: Any) -> NewSession:
    def session(runtime: Path, socket: str, **more: Any) -> dict[str, Any]:
        wishes = {
            "model": models.entry(MODEL),
            "path": str(models.path(MODEL)),
            "ep": (f"{EP}:CPU", EXACT),
            **more,
        }
        ran = child.run(
            "sessions", runtime, environment={"EPCACHE_SOCKET": socket}, timeout=120, **wishes
        )
        (one,) = ran["sessions"]
        return dict(one)

    return session


@pytest.mark.parametrize(
    ("situation", "outcomes", "warnings"), SITUATIONS, ids=[one[0].__name__ for one in SITUATIONS]
)
def test_every_situation_has_the_right_result_on_the_same_provider(
    situation: Callable[[Place], dict[str, Any]],
    outcomes: set[str],
    warnings: int,
    start: Callable[..., Daemon],
    runtime: Callable[[str], Path],
    new_session: NewSession,
    models: Any,
    tmp_path: Path,
) -> None:
    place = Place(
        start, runtime("openvino-1.8.1"), runtime("openvino-1.4.0"), new_session, tmp_path
    )
    session = situation(place)
    assert "error" not in session, session
    assert session["outcome"] in outcomes, session["why"]
    plain = new_session(place.runtime, "/nonexistent", plain=True)
    for one in (session, plain):
        assert one["executed by"] == [EP] and one["providers"][0] == EP
    np.testing.assert_allclose(session["values"][0], plain["values"][0], rtol=1e-5, atol=1e-6)
    expected = reference.mlp(models.path(MODEL), inputs.make(models.entry(MODEL))["x"])
    np.testing.assert_allclose(
        np.array(session["values"][0], np.float32), expected, rtol=1e-4, atol=1e-4
    )
    assert len(session["warnings"]) <= warnings, session["warnings"]
    if session["outcome"] in ("no daemon", "failed"):
        assert len(session["warnings"]) == 1 and session["outcome"] in session["warnings"][0]
    assert session["seconds"] < LIMIT
