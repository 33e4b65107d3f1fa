"""Without a daemon the client starts the user's own: one for all clients, detached from the
application, which exits when it is idle.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import epcache
import pytest
from descriptors import open_descriptors
from directories import short_directory
from epcache import _autostart, _connection, _connections, _programs
from epcache._connection import Lost

BIN = os.environ.get("EPCACHED_BIN", "")
real = pytest.mark.skipif(
    not BIN, reason="EPCACHED_BIN is not set: the directory with epcached, see make build"
)

# processes that start at once; a hundred take more than ten seconds
PROCESSES = int(os.environ.get("EPCACHE_TEST_PROCESSES", "40"))

# Sends a request that fails, because the daemon has no runtime, and prints the daemon's pid.
ASK = """
import os, socket, struct, sys, epcache
client = epcache.Client()
try:
    client.acquire(b"no model", "OpenVINOExecutionProvider")
except epcache.Error as caught:
    error = caught
    kind = type(error).__name__
if not client._connections._idle:
    sys.exit(f"no daemon answered: {kind}, see {error!r}")
peer = client._connections._idle[0]._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
print(kind, struct.unpack("3i", peer)[0])
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new user's home: no daemon, no configuration, no runtime directory."""
    directory = short_directory("epc-")
    for name in (
        "EPCACHE_SOCKET",
        "XDG_RUNTIME_DIR",
        "XDG_STATE_HOME",
        "XDG_CONFIG_HOME",
        _autostart.VARIABLE,
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(directory))
    monkeypatch.setenv(_autostart.PROGRAM_VARIABLE, f"{BIN}/epcached")
    monkeypatch.setattr("epcache._connections.SYSTEM_SOCKET", "/nowhere/epcached.sock")
    yield directory
    for pid in daemons(directory):
        os.kill(pid, signal.SIGTERM)
        until(lambda pid=pid: not os.path.lexists(f"/proc/{pid}/exe"))
    for path in (directory, *directory.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(directory)


def configure(home: Path, text: str) -> None:
    file = home / ".config" / "epcached" / "epcached.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


def state(home: Path) -> Path:
    return home / ".local" / "state" / "epcached"


def daemons(home: Path) -> list[int]:
    """Returns the pids of the daemons with this user's state directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"--state\0{state(home)}\0".encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                pass  # it has ended since it was listed
    return found


def has_open(pid: int, path: Path) -> bool:
    return any(os.path.realpath(one) == str(path) for one in Path(f"/proc/{pid}/fd").iterdir())


def start_client(home: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(epcache.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-c", ASK],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> tuple[str, int]:
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    kind, pid = out.split()
    return kind, int(pid)


@real
def test_concurrent_clients_start_one_daemon(home: Path) -> None:
    answers = [answer(process) for process in [start_client(home) for _ in range(PROCESSES)]]
    assert {kind for kind, _ in answers} <= {"Unavailable", "BadModel"}, "the daemon's own answers"
    assert len({pid for _, pid in answers}) == 1
    assert {pid for _, pid in answers} == set(daemons(home))


@real
def test_python_and_go_clients_use_the_same_lock(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the starters and not only the daemons, because without this lock the store's lock
    would decide after all have tried.
    """
    shutil.copy(f"{BIN}/epcachectl", home)
    # epcachectl uses the daemon beside it
    program(home, monkeypatch, f'echo x >> {home}/tried; exec {BIN}/epcached "$@"\n')
    command = [str(home / "epcachectl"), "list", "--json"]
    controls, pythons = [], []
    for _ in range(PROCESSES // 2):
        controls.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        pythons.append(start_client(home))
    for control in controls:
        out, errors = control.communicate(timeout=100)
        assert control.returncode == 0, errors
    assert {pid for _, pid in map(answer, pythons)} == set(daemons(home))
    assert (home / "tried").read_text() == "x\n"


@real
def test_all_waiting_clients_get_the_reason_of_a_failed_start(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """epcachectl retries an earlier failure, because its user may have fixed the cause, but not one
    that happened while it waited.
    """
    shutil.copy(f"{BIN}/epcachectl", home)
    fails = (
        f"until [ -e {home}/fail ]; do sleep 0.01; done; echo 'epcached: the disk is full' >&2; "
        "exit 1\n"
    )
    program(home, monkeypatch, f"echo x >> {home}/tried; {fails}")
    lock = state(home) / "epcached.sock.start"
    for attempt in (1, 2):
        (home / "fail").unlink(missing_ok=True)
        waiting = [
            subprocess.Popen(
                [str(home / "epcachectl"), "list"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(5)
        ]
        until(lambda waiting=waiting: all(has_open(one.pid, lock) for one in waiting))
        (home / "fail").touch()
        for process in waiting:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 5 and "none can be started: the disk is full" in errors
        assert (home / "tried").read_text() == "x\n" * attempt
    with pytest.raises(epcache.NoDaemon, match="cannot start a daemon: the disk is full"):
        epcache.Client().acquire(b"no model", "OpenVINOExecutionProvider")
    assert (home / "tried").read_text() == "x\n" * 2, "this client heard of it from the lock"


def control(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [f"{BIN}/epcachectl", *arguments], capture_output=True, text=True, timeout=100
    )


@real
def test_doctor_reports_a_daemon_that_a_client_started(home: Path) -> None:
    found = control("doctor")
    assert found.returncode == 0 and f"starts one: {BIN}/epcached --autostart" in found.stdout
    assert daemons(home) == [], "who looks starts none"
    _, pid = answer(start_client(home))
    found = control("doctor")
    assert (
        f"a client started it, and it exits when idle; its log is epcached.log in {state(home)}"
        in found.stdout
    )
    assert f"pid {pid}" in found.stdout


@real
def test_python_and_go_doctors_have_the_same_findings(home: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(Path(epcache.__file__).parents[1]), *filter(None, sys.path)]
        ),
    }

    def found(*command: str) -> tuple[int, list[tuple[str, ...]]]:
        done = subprocess.run(
            [*command, "--json"], env=environment, capture_output=True, text=True, timeout=300
        )
        told = json.loads(done.stdout)["findings"]
        slow = re.compile("it(s status)? took ")  # a warning on a busy machine
        return done.returncode, sorted(
            (one["severity"], one["subject"], one["hint"])
            for one in told
            if not slow.match(one["text"])
        )

    def both() -> tuple[int, list[tuple[str, ...]]]:
        ours = found(sys.executable, "-m", "epcache", "doctor")
        assert ours == found(f"{BIN}/epcachectl", "doctor", "--python", sys.executable)
        return ours

    status, seen = both()
    assert status in (0, 1) and "daemon" in [
        subject for severity, subject, _ in seen if severity == "ok"
    ], "the next program starts one"
    configure(home, "nonsense = 1\n")
    status, seen = both()
    assert status == 5 and "daemon" in [
        subject for severity, subject, _ in seen if severity == "problem"
    ]
    configure(home, "")
    answer(start_client(home))
    found(sys.executable, "-m", "epcache", "doctor")  # from then on the daemon knows this runtime
    assert both()[0] == 0
    configure(home, "nonsense = 1\n")
    until(lambda: "nonsense" in control("status").stderr)
    status, seen = both()
    assert status == 1 and "configuration" in [
        subject for severity, subject, _ in seen if severity == "problem"
    ]


# This list is also in doc/operations.md, "Stopping and removing it".
STAYS = [
    "CACHEDIR.TAG",
    "README",
    "epcached.log",
    "epcached.sock.lock",
    "epcached.sock.start",
    "index.db",
    "journal",
    "lock",
    "reserve",
]


@real
def test_rm_all_leaves_the_documented_files(home: Path) -> None:
    """The store has a model of its only user; the daemon has exited by itself."""
    configure(home, 'idle_exit = "0.3s"\n')
    answer(start_client(home))
    (state(home) / "quarantine" / "left").write_text("by a check")
    removed = control("rm", "--all", "--yes")
    assert removed.returncode == 0, removed.stderr
    until(lambda: not daemons(home))
    files = sorted(
        str(path.relative_to(state(home))) for path in state(home).rglob("*") if not path.is_dir()
    )
    assert files == STAYS
    assert [path.name for path in (home / ".local" / "state").iterdir()] == ["epcached"]
    assert sorted(path.name for path in home.iterdir()) == [".config", ".local"], (
        "the configuration is the test's"
    )


@real
def test_idle_daemon_exits_and_is_started_again(home: Path) -> None:
    configure(home, 'idle_exit = "0.3s"\n')
    first = answer(start_client(home))[1]
    until(lambda: not daemons(home))
    assert "idle for 300ms" in (state(home) / "epcached.log").read_text()
    assert answer(start_client(home))[1] != first


@real
def test_started_daemon_is_detached_from_the_application(home: Path, no_leak: None) -> None:
    """The daemon is not a child, inherits no descriptor, and gets no signal to the application's
    process group.
    """
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    with epcache.Client() as client, pytest.raises(epcache.Error):
        client.acquire(b"no model", "OpenVINOExecutionProvider")
    os.close(writing)
    assert os.read(reading, 1) == b"", "no other process has inherited the other end"
    os.close(reading)
    (pid,) = daemons(home)
    assert os.getsid(pid) != os.getsid(0)
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    assert "EPCACHE_DAEMON" not in Path(f"/proc/{pid}/environ").read_text()
    # no child is left after the starter is reaped
    with pytest.raises(ChildProcessError):
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            time.sleep(0.02)
    assert state(home).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", ["environment", "a socket by name", "EPCACHE_SOCKET"])
def test_no_daemon_is_started_if_disabled(
    home: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    client = epcache.Client(str(home / "s") if how == "a socket by name" else None)
    if how == "environment":
        monkeypatch.setenv(_autostart.VARIABLE, "0")
    if how == "EPCACHE_SOCKET":
        monkeypatch.setenv("EPCACHE_SOCKET", str(home / "s"))
    with pytest.raises(epcache.NoDaemon):
        client.acquire(b"no model", "OpenVINOExecutionProvider")
    assert list(home.iterdir()) == []


@real
def test_configuration_disables_autostart(home: Path) -> None:
    configure(home, "autostart = false\n")
    with pytest.raises(epcache.NoDaemon, match="disabled in"):
        epcache.Client().acquire(b"no model", "OpenVINOExecutionProvider")
    assert daemons(home) == []


def test_daemon_started_during_the_lookup_is_waited_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon with many first requests is slow, and was not noticed as new before connecting."""
    limits: list[float] = []

    def dial(self: _connections.Connections, path: str, limit: _connection.Limit) -> str:
        if str(home) not in path:
            raise Lost(f"connect to {path}")
        limits.append(limit.left())
        state(home).mkdir(parents=True, exist_ok=True)
        Path(path).touch()
        if limits[-1] < 1:
            raise epcache.DeadlineExceeded("no answer in time")
        return "connected"

    monkeypatch.setattr(_connections.Connections, "_dial", dial)
    assert (
        epcache.Client()._connections.connect(time.monotonic() + 60, _autostart.PATIENCE)
        == "connected"
    )
    assert len(limits) == 2
    limits.clear()
    Path(epcache.default_sockets()[0]).unlink()
    with pytest.raises(epcache.NoDaemon):  # a request that does not wait for a compile
        epcache.Client()._connections.connect(time.monotonic() + 60)
    assert max(limits) < 1


@pytest.mark.parametrize(("age", "wait"), [(0, 10), (15, 10), (25, 5), (31, 0)])
def test_timeout_for_a_new_daemon(home: Path, age: float, wait: float) -> None:
    """The last of a hundred clients may connect when the daemon is not quite new, but the machine
    is still busy.
    """
    socket_path = Path(epcache.default_sockets()[0])
    socket_path.parent.mkdir(parents=True)
    socket_path.touch()
    now = time.time()
    os.utime(socket_path, (now - age,) * 2)
    new_daemon_seconds = _autostart.new_daemon_seconds(str(socket_path))
    passed = time.time() - now  # the test's own delay
    assert wait - passed - 0.1 <= new_daemon_seconds <= wait + 0.1


def program(home: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    path = home / "epcached"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    monkeypatch.setenv(_autostart.PROGRAM_VARIABLE, str(path))
    return path


def test_failed_start_is_reported_and_not_retried_at_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, no_leak: None
) -> None:
    program(
        home,
        monkeypatch,
        f"echo x >> {home}/tried; echo 'epcached: the disk is full' >&2; exit 1\n",
    )
    for _ in range(3):
        with pytest.raises(epcache.NoDaemon, match="cannot start a daemon: the disk is full"):
            epcache.Client().acquire(b"no model", "OpenVINOExecutionProvider")
    assert (home / "tried").read_text() == "x\n"


def test_request_without_patience_does_not_wait_for_the_start(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(home, monkeypatch, "exec sleep 10\n")
    with pytest.raises(epcache.NoDaemon, match="does not answer yet"):
        epcache.Client(hello_limit=0.01).acquire(
            b"no model", "OpenVINOExecutionProvider", on_miss="background"
        )


@pytest.mark.parametrize("how", ["no home", "home is a file", "open to others"])
def test_no_daemon_without_a_writable_directory(
    home: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "open to others":
        state(home).mkdir(parents=True)
        state(home).chmod(0o777)
    else:
        (home / "file").touch()
        monkeypatch.setenv("HOME", str(home / "file") if how == "home is a file" else "relative")
    before = open_descriptors()
    with pytest.raises(epcache.NoDaemon, match="cannot start a daemon"):
        epcache.Client().acquire(b"no model", "OpenVINOExecutionProvider")
    assert open_descriptors() == before
    assert daemons(home) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused(home: Path) -> None:
    """With sudo, HOME is another user's: no daemon there is used, and nothing is created."""
    state(home).mkdir(parents=True, mode=0o700)
    os.chown(state(home), 4711, 4711)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(state(home) / "epcached.sock"))
        other.listen()
        assert epcache.default_sockets() == ["/nowhere/epcached.sock"]
        with pytest.raises(epcache.NoDaemon, match="owned by another user"):
            epcache.Client().acquire(b"no model", "OpenVINOExecutionProvider")


def test_modules_that_can_no_longer_be_imported(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules that start a daemon are imported late, and a process may have dropped the
    privileges to read them by then.
    """
    monkeypatch.delenv(_autostart.PROGRAM_VARIABLE)
    monkeypatch.setitem(sys.modules, "shutil", None)
    with (
        pytest.raises(epcache.NoDaemon, match="cannot start a daemon: import of shutil"),
        epcache.Client() as client,
    ):
        client.acquire(b"no model", "OpenVINOExecutionProvider")


def test_a_descriptor_above_the_limit_is_left_to_the_daemon():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = fcntl.fcntl(0, fcntl.F_DUPFD, 200)
    os.set_inheritable(high, True)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(128, hard), hard))
        closed = [action[1] for action in _programs.only_descriptors((0, 1, 2))[3:]]
        assert high not in closed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(high)


def test_reasons_name_the_variable_to_set(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("n" * 120)))
    assert "set XDG_RUNTIME_DIR to a short one" in _autostart._usable_socket()[1]
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/self")
    assert "set XDG_STATE_HOME to a directory of this user" in _autostart._usable_socket()[1]
