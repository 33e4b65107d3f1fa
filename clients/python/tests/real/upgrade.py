"""A runtime that is replaced by another one while the daemon and applications run."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
from daemon import Daemon

PATIENCE = 60.0


def likeness(place: Path, real: Path, pause: float = 0) -> None:
    """Fills `place` with links to the files of `real`, each by one rename, and removes other files.
    Links avoid copies of hundreds of megabytes. Waits `pause` seconds after each library.
    """
    wanted = {
        path.relative_to(real)
        for path in real.rglob("*")
        if not path.is_dir() and "__pycache__" not in path.parts
    }
    for name in sorted(wanted):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        link(place / name, real / name)
        if pause and ".so" in name.name:
            time.sleep(pause)
    for path in place.rglob("*"):
        if not path.is_dir() and path.relative_to(place) not in wanted:
            path.unlink()


def link(path: Path, target: Path) -> None:
    new = path.with_name(path.name + ".new")
    new.symlink_to(target)
    new.replace(path)


class Place:
    """A directory with a runtime that changes."""

    def __init__(self, directory: Path, first: Path) -> None:
        self.directory = directory
        self.path = directory / "runtime"
        self.now = first
        self.changes: list[tuple[float, float]] = []  # begin and end of each change
        self.begin(first)

    def begin(self, first: Path) -> None:
        raise NotImplementedError

    def prepare(self, to: Path) -> None:
        """Prepares the change, which is not visible yet."""

    def change(self, to: Path) -> None:
        raise NotImplementedError

    def become(self, to: Path, between: tuple[Callable[[], Any], ...] = ()) -> float:
        """Replaces the runtime, and returns the time of its end. The first function in `between` is
        called just before the change, the others just after it.
        """
        self.prepare(to)
        began = time.monotonic()
        for before in between[:1]:
            before()
        self.change(to)
        for after in between[1:]:
            after()
        self.now = to
        self.changes.append((began, time.monotonic()))
        return self.changes[-1][1]

    def changing(self, since: float, until: float) -> bool:
        """Whether a change was in progress at any time between two points in time."""
        return any(began < until and since < ended for began, ended in self.changes)

    def mixed(self, record: dict[str, Any]) -> bool:
        """Whether the record's process may have loaded libraries of two versions."""
        return self.changing(record["started"], record["ready"])


class Link(Place):
    """The directory is a symbolic link, which is switched."""

    def begin(self, first: Path) -> None:
        self.path.symlink_to(first)

    def change(self, to: Path) -> None:
        link(self.path, to)


class Directory(Place):
    """The directory is renamed, and another one gets its name."""

    def begin(self, first: Path) -> None:
        likeness(self.path, first)

    def prepare(self, to: Path) -> None:
        if not (self.directory / to.name).exists():
            likeness(self.directory / to.name, to)

    def change(self, to: Path) -> None:
        self.path.rename(self.directory / self.now.name)
        time.sleep(0.05)  # a moment without a directory
        (self.directory / to.name).rename(self.path)


class Files(Place):
    """The files are replaced by renames in sequence; then the remaining ones of the old version are
    removed.
    """

    def begin(self, first: Path) -> None:
        likeness(self.path, first)

    def change(self, to: Path) -> None:
        likeness(self.path, to, pause=0.01)


class Written(Place):
    """The libraries are overwritten in place: same files, other bytes."""

    def begin(self, first: Path) -> None:
        likeness(self.path, first)
        self._write(first)

    def change(self, to: Path) -> None:
        self._write(to)

    def _write(self, real: Path) -> None:
        libraries = [path.relative_to(real) for path in real.rglob("*.so*")]
        for name in libraries:
            path = self.path / name
            if path.is_symlink():
                path.unlink()
            shutil.copyfile(real / name, path)
        for path in self.path.rglob("*.so*"):
            if path.relative_to(self.path) not in libraries:
                path.unlink()


WAYS: dict[str, type[Place]] = {
    "link switched": Link,
    "directory renamed": Directory,
    "file by file": Files,
    "written over": Written,
}


SPOILED = {
    "OpenVINOExecutionProvider": "libopenvino_intel_cpu_plugin.so",
    "QNNExecutionProvider": "libQnnHtp.so",
}
PLUGIN = {
    "OpenVINOExecutionProvider": "libonnxruntime_providers_openvino_plugin.so",
    "QNNExecutionProvider": "libonnxruntime_providers_qnn.so",
}

CRASHES = """
#include <signal.h>
void *CreateEpFactories(void) { raise(SIGSEGV); return 0; }
void *ReleaseEpFactory(void) { return 0; }
"""


class Broken(Files):
    """An upgrade that stops half way: no file works until the runtime is another one."""

    def _library(self, name: str) -> Path:
        (path,) = self.path.rglob(name)
        return path

    def spoil(self, how: str, ep: str) -> None:
        began = time.monotonic()
        if how == "missing":
            plugin = self._library(PLUGIN[ep])
            plugin.unlink()
            # what the tests' shim for other processors hands over to is a plugin as well
            (plugin.parent / "libvendor_openvino_plugin.so").unlink(missing_ok=True)
        elif how == "partly copied":
            path = self._library(SPOILED[ep])
            whole = path.read_bytes()
            part = path.with_name(path.name + ".part")
            part.write_bytes(whole[: len(whole) // 3])
            part.replace(path)
        else:
            source = self.directory / "crashes.c"
            source.write_text(CRASHES)
            path = self._library(PLUGIN[ep])
            made = self.directory / path.name
            subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source], check=True)
            made.replace(path)
        self.changes.append((began, float("inf")))  # until it becomes another

    def become(self, to: Path, between: tuple[Callable[[], Any], ...] = ()) -> float:
        ended = super().become(to, between)
        self.changes = [(began, min(end, ended)) for began, end in self.changes]
        return ended


class Applications:
    """Processes that send requests and load artefacts all the time; each is followed by a new one.
    Some send requests at once and for long; others register the provider's library first, and send
    few requests later.
    """

    KINDS = ({"pause": 0.0, "requests": 100}, {"pause": 0.4, "requests": 3})

    def __init__(
        self, daemon: Daemon, place: Place, ep: str, options: dict[str, str], model: Path
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="epcached-upgrade-")
        self._stop = Path(self._directory.name) / "stop"
        self._said = [
            Path(self._directory.name) / f"said{number}" for number in range(len(self.KINDS))
        ]
        self._read = [0] * len(self.KINDS)  # characters of each file
        self._records: list[dict[str, Any]] = []
        # time and cause of each crash
        self.crashes: list[tuple[float, str]] = []
        self._arguments = {
            "socket": daemon.socket,
            "ep": ep,
            "options": options,
            "model": str(model),
            "stop": str(self._stop),
        }
        self._place = place
        self._ep = ep
        self._threads = [
            threading.Thread(target=self._follow, args=pair)
            for pair in zip(self._said, self.KINDS, strict=True)
        ]

    def __enter__(self) -> Applications:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._directory.cleanup()

    def stop(self) -> None:
        self._stop.touch()
        for thread in self._threads:
            thread.join()

    def _follow(self, said: Path, kind: dict[str, Any]) -> None:
        # No byte code is written, because it would be among the libraries.
        environment = {"PYTHONDONTWRITEBYTECODE": "1"}
        while not self._stop.exists():
            try:
                arguments = {
                    "said": str(said),
                    "started": time.monotonic(),
                    **kind,
                    **self._arguments,
                }
                child.Child(
                    "loading", self._place.path, environment=environment, **arguments
                ).result()
            except Exception as error:  # its libraries were replaced while it was running
                self.crashes.append((time.monotonic(), str(error)))
                time.sleep(0.05)

    def records(self) -> list[dict[str, Any]]:
        """Returns the results of all requests so far, in the order of the answers."""
        for number, said in enumerate(self._said):
            new = said.read_text()[self._read[number] :] if said.exists() else ""
            new = new[: new.rfind("\n") + 1]
            self._read[number] += len(new)
            self._records += (json.loads(line) for line in new.splitlines())
        self._records.sort(key=lambda record: record["answered"])
        return self._records

    def wait(self, what: str, met: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Returns the records as soon as they meet a condition."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            records = self.records()
            if met(records):
                return records
            time.sleep(0.02)
        raise AssertionError(
            f"not within {PATIENCE:.0f} s: {what}; the last of {len(records)} records: "
            f"{records[-3:]}; crashes: {self.crashes[-3:]}"
        )

    def loads_after(self, moment: float, count: int = 4) -> list[dict[str, Any]]:
        """Waits for `count` loads by processes started after a point in time, and returns them."""

        def after(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [r for r in records if r["started"] > moment and "loaded" in r]

        return after(self.wait(f"{count} loads", lambda records: len(after(records)) >= count))

    def settle(self, moment: float, count: int = 4) -> dict[str, Any]:
        """Waits until `count` loads in a row, by processes that were started after a point in time,
        are of one optimal build. Returns the last one.
        """

        def one_build(records: list[dict[str, Any]]) -> bool:
            last = [r for r in records if r["started"] > moment and "loaded" in r][-count:]
            return (
                len(last) == count
                and len({r["build"] for r in last}) == 1
                and {r["compatibility"] for r in last} == {"optimal"}
            )

        self.wait("one optimal build", one_build)
        return self.loads_after(moment, count)[-1]

    def require_no_refusal(self, runtimes: list[Path]) -> None:
        """Requires that no artefact was served that the libraries of the process which asked do not
        load.

        Exempt is a process that was started in the middle of a change and has libraries of both
        versions, or one that lost its libraries between request and load. Its artefact is loaded
        again, with the runtime with which it had begun.
        """
        for record in self.records():
            if "refused" not in record:
                continue
            own = [
                runtime for runtime in runtimes if Path(record["library"]).is_relative_to(runtime)
            ]
            for runtime in own[:1]:  # none if the library itself was overwritten
                options, session_options = (
                    record["provider_options"][self._ep],
                    record["session_options"],
                )
                opinion = child.run(
                    "loadable",
                    runtime,
                    path=record["kept"],
                    ep=self._ep,
                    options=options,
                    session_options=session_options,
                )
                assert opinion == "", (runtime.name, opinion, record)
            taken_away = any(
                record["asked"] < began < record["refused_at"] for began, _ in self._place.changes
            )
            assert self._place.mixed(record) or taken_away, (self._place.changes, record)
