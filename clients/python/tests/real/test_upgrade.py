"""Real upgrades: versions of the vendors' packages replace each other while the daemon and
applications run.

Each application is a process that has loaded one version's libraries. It requests a model
repeatedly and loads each artefact with plain ONNX Runtime; then it exits, and the next one starts
with the current libraries. So there are requests at every moment of a change, and every answer is
loaded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import child
import epcache
import pytest
from daemon import Daemon
from upgrade import PATIENCE, WAYS, Applications, Broken, Place

OPENVINO, QNN = "OpenVINOExecutionProvider", "QNNExecutionProvider"
OPTIONS: dict[str, dict[str, str]] = {
    OPENVINO: {},
    QNN: {"soc_model": "60", "enable_htp_fp16_precision": "1"},
}

# Sequences of runtimes. One that is named twice is a downgrade.
CHAINS = {
    "OpenVINO": (
        OPENVINO,
        [
            "openvino-1.4.0",
            "openvino-1.8.1",
            "openvino-1.4.0",
            "openvino-1.8.0-ort-1.28.0",
            "openvino-1.8.1",
        ],
    ),
    "QNN": (QNN, ["qnn-2.5.0", "qnn-2.7.0", "qnn-2.5.0"]),
    "ONNX Runtime": (
        OPENVINO,
        ["openvino-1.8.1-ort-1.28.0", "openvino-1.8.1", "openvino-1.8.1-ort-1.28.0"],
    ),
}
SDKS = {"openvino-1.4": "2026.1", "openvino-1.8": "2026.4", "qnn-2.5": "v2.49", "qnn-2.7": "v2.51"}

# Texts of the events about the new runtime, by chain.
CAME = {
    "OpenVINO": ["version: 1.8.1", "version: 1.4.0", "version: 1.8.0", "version: 1.8.1"],
    "QNN": ["SDK: v2.51", "SDK: v2.49"],
    "ONNX Runtime": ["ONNX Runtime: 1.31.1", "ONNX Runtime: 1.28.0"],
}

# The daemon of a test, with a runtime in a place.
Begin = Callable[[Path], Daemon]


def sdk_of(runtime: Path) -> str:
    return next(sdk for name, sdk in SDKS.items() if runtime.name.startswith(name))


def steady(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the last few records if they are loads of one optimal build."""
    last = [record for record in records if "build" in record][-4:]
    settled = (
        len(last) == 4
        and len({record["build"] for record in last}) == 1
        and all(r["compatibility"] == "optimal" for r in last)
    )
    return last if settled else []


@pytest.fixture
def begin(programs: Path) -> Iterator[Begin]:
    daemons: list[Daemon] = []

    def start(runtime: Path) -> Daemon:
        daemons.append(Daemon(programs, [runtime]))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chain", CHAINS)
def test_upgrade_and_back(
    chain: str, way: str, begin: Begin, runtime: Callable[[str], Path], models: Any, tmp_path: Path
) -> None:
    ep, names = CHAINS[chain]
    runtimes = [runtime(name).resolve() for name in names]
    place = WAYS[way](tmp_path, runtimes[0])
    daemon = begin(place.path)
    # by the runtime's name, the build that its applications get in the end
    builds: dict[str, str] = {}
    with Applications(daemon, place, ep, OPTIONS[ep], models.path("tiny-mlp")) as applications:
        until = 0.0
        for number, now in enumerate(runtimes):
            compiles = daemon.compiles()
            if number > 0:
                until = place.become(now)
                # Applications may be served before the event of the change, and a change that is
                # reverted before has no event.
                require_told(daemon, place, CAME[chain][:number])
            if now.name in builds:
                for load in applications.loads_after(until):
                    assert (load["outcome"], load["build"]) == ("hit", builds[now.name])
                assert daemon.compiles() == compiles
            else:
                last = applications.settle(until)
                builds[now.name] = last["build"]
                assert last["sdk_version"].startswith(sdk_of(now))
        applications.stop()
        require_right(applications, place, runtimes)
    events = daemon.events()
    assert set(builds.values()) <= {
        e["build"] for e in events if e["kind"] in ("compiled", "rebuilt")
    }
    if len(set(builds.values())) > 1:
        assert set(builds.values()) & {e["build"] for e in events if e["kind"] == "judged"}


PAIRS = {OPENVINO: ("openvino-1.8.1", "openvino-1.4.0"), QNN: ("qnn-2.7.0", "qnn-2.5.0")}


@pytest.mark.parametrize("ep", PAIRS)
def test_upgrade_while_the_daemon_is_stopped(
    ep: str, begin: Begin, runtime: Callable[[str], Path], models: Any, tmp_path: Path
) -> None:
    first, second = (runtime(name).resolve() for name in PAIRS[ep])
    place = WAYS["file by file"](tmp_path, first)
    daemon = begin(place.path)
    with Applications(daemon, place, ep, OPTIONS[ep], models.path("tiny-mlp")) as applications:
        before = applications.settle(0)
        until = place.become(second, between=(daemon.stop, daemon.start))
        between = applications.settle(until)
        assert (
            between["sdk_version"].startswith(sdk_of(second))
            and between["build"] != before["build"]
        )
        until = place.become(first, between=(daemon.stop, daemon.start))
        compiles = daemon.compiles()
        for load in applications.loads_after(until):
            assert (load["outcome"], load["build"]) == ("hit", before["build"])
        assert daemon.compiles() == compiles
        applications.stop()
        require_right(applications, place, [first, second], ("NoDaemon",))


# Texts of the answer for a runtime with a library that is missing, crashes or is incomplete.
TROUBLES = {
    "missing": "EP library: not found",
    "crashing": "segmentation fault",
    "partly copied": "bus error",
}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("ep", PAIRS)
def test_upgrade_with_a_broken_version_between(
    ep: str, trouble: str, begin: Begin, runtime: Callable[[str], Path], models: Any, tmp_path: Path
) -> None:
    first, second = (runtime(name).resolve() for name in PAIRS[ep])
    place = Broken(tmp_path, first)
    daemon = begin(place.path)
    model = models.path("tiny-mlp")
    with (
        Applications(daemon, place, ep, OPTIONS[ep], model) as applications,
        epcache.Client(daemon.socket, hello_limit=10) as client,
    ):
        before = applications.settle(0)
        place.spoil(trouble, ep)
        with pytest.raises(epcache.Unavailable, match=TROUBLES[trouble]):
            client.acquire(model, (f"{ep}:CPU", OPTIONS[ep]), runtime=str(place.path)).close()
        until = place.become(second)
        assert applications.settle(until)["sdk_version"].startswith(sdk_of(second))
        compiles = daemon.compiles()
        until = place.become(first)
        for load in applications.loads_after(until):
            assert (load["outcome"], load["build"]) == ("hit", before["build"])
        assert daemon.compiles() == compiles
        applications.stop()
        require_right(applications, place, [first, second])


def test_versions_that_read_each_others_builds(
    start: Callable[..., Daemon], runtime: Callable[[str], Path], models: Any, tmp_path: Path
) -> None:
    """OpenVINO 1.8.0 and 1.8.1 state the same SDK version and load each other's builds, but not
    those of 1.4.0.
    """
    old, older, newer = (
        runtime(f"openvino-{name}") for name in ("1.4.0", "1.8.0-ort-1.28.0", "1.8.1")
    )
    daemon = start(old, older, newer)

    def run_upgraded(where: Path, model: str) -> dict[str, Any]:
        said = tmp_path / f"said {where.name} {model}"
        arguments = {
            "socket": daemon.socket,
            "ep": OPENVINO,
            "options": {},
            "model": str(models.path(model)),
            "said": str(said),
        }
        child.run(
            "loading",
            where,
            **arguments,
            stop=str(tmp_path / "stop"),
            started=0.0,
            pause=0.0,
            requests=1,
        )
        record: dict[str, Any] = json.loads(said.read_text())
        assert "loaded" in record, record
        return record

    for model, first, second in (("tiny-mlp", newer, older), ("tiny-convolution", older, newer)):
        made, other = run_upgraded(first, model), run_upgraded(second, model)
        assert (made["outcome"], made["compatibility_source"]) == ("compiled", "same library")
        assert (other["outcome"], other["build"]) == ("hit", made["build"])
        assert (other["compatibility"], other["compatibility_source"]) == (
            "optimal",
            "execution provider",
        )
        assert sdk_of(older) == sdk_of(newer) == other["sdk_version"]
        for version in ("1.8.0", "1.8.1"):  # of the build, and of the request
            assert version in other["compatibility_reason"]
        apart = run_upgraded(old, model)
        assert (apart["outcome"], apart["compatibility"]) == ("compiled", "optimal")
        assert apart["request_key"] == made["request_key"] and apart["build"] != made["build"]
    assert daemon.compiles() == 4


def require_told(daemon: Daemon, place: Place, came: list[str]) -> None:
    """Waits for the daemon's events about these changes, in this order."""
    until = time.monotonic() + PATIENCE
    while True:
        events = daemon.events()
        changes = (
            event["text"]
            for event in events
            if event["kind"] == "changed" and event["runtime"] == str(place.path)
        )
        if all(any(one in text for text in changes) for one in came):
            return
        assert time.monotonic() < until, (came, events)
        time.sleep(0.2)


def require_right(
    applications: Applications, place: Place, runtimes: list[Path], more: tuple[str, ...] = ()
) -> None:
    """Checks all requests: no refused artefacts, and only expected errors."""
    records = applications.records()
    applications.require_no_refusal(runtimes)
    for record in records:
        if "error" in record:
            assert record["class"] in ("Unavailable", "Busy", *more), record
            assert place.changing(record["started"], record["answered"]), record
    for ended, how in applications.crashes:
        assert any(began < ended for began, _ in place.changes), how
