"""Environment variables: the table in doc/operations.md has those that the sources read, and Python
and Go interpret them alike.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import epcache
import pytest

PROJECT = Path(__file__).parents[3]
BIN = os.environ.get("EPCACHED_BIN", "")
go = pytest.mark.skipif(
    not BIN, reason="EPCACHED_BIN is not set: the directory with epcachectl, see make build"
)

# Read by the standard libraries: our sources do not contain these names.
BY_LIBRARIES = {"PATH", "XDG_CONFIG_HOME", "LISTEN_FDS", "JOURNAL_STREAM"}
# Conventions of terminals, which doc/operations.md does not repeat.
OF_TERMINALS = {"NO_COLOR", "TERM"}
# Set for child processes or by tests: clients do not read them.
NOT_READ = re.compile(r"EPCACHED_|XDG_CACHE_HOME$|CC$|XDG_$|EPCACHE_$")


def in_table() -> set[str]:
    text = (PROJECT / "doc" / "operations.md").read_text()
    rows = text.partition("| variable | read by |")[2].partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([A-Z_]+)`", row.split("|")[1])}


def sources() -> Iterator[Path]:
    for directory in (
        "cmd",
        "unixsock",
        "cache",
        "compilers",
        "store",
        "cas",
        "dedupe",
        "index",
        "internal",
    ):
        assert (PROJECT / directory).is_dir(), directory
        yield from (
            path
            for path in (PROJECT / directory).rglob("*.go")
            if not path.name.endswith("_test.go")
        )
    yield from (PROJECT / "clients" / "python" / "epcache").rglob("*.py")


def in_sources() -> set[str]:
    ours = r'"((?:EPCACHE|EPCACHED|XDG)_[A-Z_]*)[="]'
    direct = r'(?:Getenv\(|LookupEnv\(|environ\.get\(|environ\[|getenv\()"([A-Z_]+)"'
    lists = (
        r'range \[\]string\{((?:"[A-Z_]+"(?:, )?)+)\}|for name in \(((?:"[A-Z_]+"(?:, )?)+)\) if '
        r'name in os\.environ'
    )
    found: set[str] = set()
    for path in sources():
        text = path.read_text()
        found.update(re.findall(ours, text), re.findall(direct, text))
        for groups in re.findall(lists, text):
            found.update(re.findall(r'"([A-Z]+_[A-Z_]+)"', "".join(groups)))
    return {name for name in found if not NOT_READ.match(name)}


def test_documented_variables_are_those_in_the_sources() -> None:
    assert {"EPCACHE_SOCKET", "XDG_STATE_HOME", "VIRTUAL_ENV", "LD_PRELOAD"} <= in_sources(), (
        "the sources are not found, or not understood"
    )
    assert in_table() - BY_LIBRARIES == in_sources() - OF_TERMINALS


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """A new user with a daemon's program that records its start, and fails."""
    # because tmp_path may be too long for a socket's path
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "daemon"
        program.write_text(
            f"#!/bin/sh\ntouch {directory}/started\necho 'epcached: a test'\nexit 1\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        (Path(directory) / "home").mkdir()
        yield {"PATH": "/usr/bin:/bin", "HOME": f"{directory}/home", "EPCACHE_DAEMON": str(program)}


def started(environment: dict[str, str], client: str) -> bool:
    """Whether a client in this environment tries to start the daemon."""
    ask = "import epcache\ntry: epcache.Client().acquire(b'', 'X')\nexcept epcache.NoDaemon: pass"
    command = (
        [sys.executable, "-c", ask]
        if client == "python"
        else [f"{BIN}/epcachectl", "list", "--wait", "0s"]
    )
    mark = Path(environment["EPCACHE_DAEMON"]).parent / "started"
    mark.unlink(missing_ok=True)
    for notes in Path(environment["HOME"]).rglob("*.start"):
        notes.unlink()  # the recorded failure, which would prevent a retry
    where = {"PYTHONPATH": str(PROJECT / "clients" / "python")}
    subprocess.run(
        command, env={**environment, **where}, capture_output=True, timeout=60, check=False
    )
    return mark.exists()


@go
@pytest.mark.skipif(
    Path("/run/epcached/epcached.sock").exists(),
    reason="this machine has a daemon, so none is started",
)
@pytest.mark.parametrize(
    ("value", "starts"),
    [
        (None, True),
        ("", True),
        ("1", True),
        ("yes", True),
        ("2", True),
        ("0", False),
        ("no", False),
        ("off", False),
        ("False", False),
        ("FALSE", False),
    ],
)
def test_all_clients_parse_autostart_alike(
    value: str | None, starts: bool, environment: dict[str, str]
) -> None:
    if value is not None:
        environment["EPCACHE_AUTOSTART"] = value
    assert (started(environment, "python"), started(environment, "go")) == (starts, starts)


@go
def test_no_daemon_is_started_for_a_named_socket(environment: dict[str, str]) -> None:
    environment["EPCACHE_SOCKET"] = "/nonexistent/s"
    assert (started(environment, "python"), started(environment, "go")) == (False, False)
    if not Path("/run/epcached/epcached.sock").exists():
        environment["EPCACHE_SOCKET"] = ""
        assert (started(environment, "python"), started(environment, "go")) == (True, True)


@go
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"EPCACHE_SOCKET": "/one/s"},
        {"EPCACHE_SOCKET": ""},
        {"EPCACHE_SOCKET": "relative/s", "XDG_RUNTIME_DIR": "/run/user/7"},
        {"XDG_RUNTIME_DIR": "/run/user/7"},
        {"XDG_RUNTIME_DIR": "relative"},
        {"XDG_RUNTIME_DIR": ""},
        {"XDG_STATE_HOME": "/state"},
        {"XDG_STATE_HOME": "relative"},
        {"XDG_STATE_HOME": "", "XDG_RUNTIME_DIR": "/run/user/7"},
        {"HOME": "relative"},
        {"HOME": "/nonexistent"},
    ],
    ids=str,
)
def test_all_clients_have_the_same_default_sockets(
    given: dict[str, str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EPCACHE_SOCKET", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment := {**environment, **given}).items():
        monkeypatch.setenv(name, value)
    # doctor only checks, and starts nothing.
    done = subprocess.run(
        [f"{BIN}/epcachectl", "status", "--wait", "0s"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 0:
        pytest.skip("this machine has a daemon")
    told = re.search(r"no daemon answers at (.*): ", done.stderr.splitlines()[0])
    assert told is not None, done.stderr
    assert told[1].split(" or ") == epcache.default_sockets()
