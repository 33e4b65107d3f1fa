"""What this Python's sessions would use, and what keeps them from the cache: python -m epcache
doctor.

epcachectl examines the daemon and the machine if it is installed; otherwise this module does. ONNX
Runtime and each package of an execution provider are loaded in a process of their own, because they
may crash.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from . import _autostart, _errors, _worker
from ._client import Client
from ._connection import Connection
from ._connections import SOCKET_VARIABLE, SYSTEM_SOCKET, default_sockets
from ._version import __version__

OK, WARNING, PROBLEM = "ok", "warning", "problem"
DONE, FAILED, NO_DAEMON = 0, 1, 5  # exit statuses, those of epcachectl
REFUSALS = ("protocol", "rights")  # subjects about a daemon that is there

OLDEST = (1, 24)  # of ONNX Runtime
# longer than a session waits: what is slow is to be told from what is not there
CONNECT_LIMIT = 2.0
CHILD_LIMIT = 60.0
MARK = "epcache-doctor:"  # before the one line that counts: vendors' libraries print, too
_CHILD = "import sys; from epcache import _doctor_child as d; d.tell(*sys.argv[1:])"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. The names are those of epcachectl doctor --json."""

    severity: str  # "ok", "warning", "problem"
    subject: str
    text: str
    hint: str = ""
    side: str = "application"  # "client": about the daemon; "application": about this Python


def run(socket: str, as_json: bool, application: bool) -> int:
    """Prints what is found, of this Python alone where it is an application, and returns the exit
    status.
    """
    found, answering = look(socket, application)
    counts = {
        severity: sum(one.severity == severity for one in found)
        for severity in (PROBLEM, WARNING, OK)
    }
    if as_json:
        findings = [asdict(one) for one in found]
        print(
            json.dumps(
                {
                    "problems": counts[PROBLEM],
                    "warnings": counts[WARNING],
                    "daemon": bool(answering),
                    "findings": findings,
                },
                indent=2,
            )
        )
    else:
        for one in sorted(found, key=lambda one: (PROBLEM, WARNING, OK).index(one.severity)):
            print(f"{one.severity:8} {one.subject}: {one.text}")
            if one.hint:
                print(f"{'':8} -> {one.hint}")
        problems, warnings = (
            f"{number} {what}{'' if number == 1 else 's'}"
            for what, number in counts.items()
            if what != OK
        )
        print("no problems found" if counts[OK] == len(found) else f"{problems}, {warnings}")
    if not answering and any(
        one.side == "client" and one.severity == PROBLEM and one.subject not in REFUSALS
        for one in found
    ):
        return NO_DAEMON
    return FAILED if counts[PROBLEM] else DONE


def look(socket: str = "", application: bool = False) -> tuple[list[Finding], str]:
    """Returns what is found, and the socket of the daemon that answers, "" where none does."""
    seen: list[Finding] = []
    answering = _daemon(seen, socket)
    found = [] if application else _machine(socket) or seen
    found.append(_worker_here())
    if (built_in := _onnxruntime(found)) is not None:
        _execution_providers(found, answering, built_in)
    return found, answering


def _machine(socket: str) -> list[Finding]:
    """Has epcachectl look at daemon, configuration and machine; nothing where there is no
    epcachectl.
    """
    program = _autostart.control()
    if not program:
        return []
    command = [program, "doctor", "--json", *(["--socket", socket] if socket else [])]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CHILD_LIMIT, check=False
        )
        found = [
            Finding(**{name: str(one[name]) for name in Finding.__annotations__})
            for one in json.loads(done.stdout)["findings"]
        ]
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError) as error:
        return [
            Finding(
                WARNING,
                "epcachectl",
                f"{program} gives no answer: {error}",
                "install epcachectl and epcache of the same release",
                "client",
            )
        ]
    return [
        one if one.severity in (OK, WARNING, PROBLEM) else replace(one, severity=OK)
        for one in found
    ]


def _daemon(found: list[Finding], named: str) -> str:
    """Finds the daemon that a session would ask."""
    failed, absent = [], True
    for path in [named] if named else default_sockets():
        started = time.monotonic()
        try:
            connection = Connection(
                path, started + CONNECT_LIMIT, f"python epcache {__version__} doctor"
            )
        except _errors.Error as error:
            failed.append(str(error))
            absent = absent and _autostart.absent(path, error, path == SYSTEM_SOCKET)
            continue
        seconds = time.monotonic() - started
        connection.close()
        text = f"{connection.server} answers at {path} in {seconds * 1000:.0f} ms"
        found.append(Finding(OK, "daemon", text, side="client"))
        return path
    reason = "; ".join(failed)
    program = _autostart.find()
    if named or os.environ.get(SOCKET_VARIABLE):
        hint = (
            "start epcached there, or unset EPCACHE_SOCKET, which prevents the use of other daemons"
        )
    elif not absent:
        hint = (
            "check its process, which may be suspended, and its log; sessions do not start a "
            "second daemon"
        )
    elif not _autostart.switched_on():
        hint = f"start epcached; sessions do not start one, for {_autostart.VARIABLE} says so"
    elif not program:
        hint = (
            "start epcached, or install the package with its programs, so that sessions can "
            "start one"
        )
    else:
        found.append(
            Finding(
                OK,
                "daemon",
                f"none runs; the first session starts {program}",
                f"looked for: {reason}",
                "client",
            )
        )
        return ""
    found.append(
        Finding(
            PROBLEM,
            "daemon",
            f"none answers, so sessions compile by themselves: {reason}",
            hint,
            "client",
        )
    )
    return ""


def _worker_here() -> Finding:
    program = _worker.find()
    text = (
        f"on_miss='claim' compiles in {program}"
        if program
        else "none found: on_miss='claim' compiles in the application's own process"
    )
    return Finding(OK, "worker", text)


def _onnxruntime(found: list[Finding]) -> list[str] | None:
    """Looks at ONNX Runtime itself. Returns the execution providers that are part of it; None where
    no others can be looked for.
    """
    from importlib import metadata

    owners = sorted(set(metadata.packages_distributions().get("onnxruntime", [])))
    if len(owners) > 1:
        text = f"several installed packages overwrite each other: {', '.join(owners)}"
        found.append(
            Finding(PROBLEM, "onnxruntime", text, "uninstall all of them, and install one")
        )
    told = _child("onnxruntime")
    if error := told.get("error"):
        found.append(Finding(PROBLEM, "onnxruntime", error, "pip install onnxruntime"))
        return None
    text = f"{told['version']} in {told['directory']}, with {', '.join(told['providers'])} built in"
    if tuple(int(part) for part in told["version"].split(".")[:2]) < OLDEST or not told["plugins"]:
        hint = (
            f"version {'.'.join(map(str, OLDEST))} or later is needed for plugin execution "
            "providers"
        )
        found.append(Finding(PROBLEM, "onnxruntime", text, hint))
        return None
    found.append(Finding(OK, "onnxruntime", text))
    return [str(name) for name in told["providers"]]


def _execution_providers(found: list[Finding], socket: str, built_in: list[str]) -> None:
    usable = 0
    for name, package in _child("built in", *built_in).get("plugins", {}).items():
        text = (
            "part of this ONNX Runtime, so the daemon cannot compile for it: its sessions are "
            "plain ones, except with on_miss='claim'"
        )
        hint = (
            f"uninstall this ONNX Runtime, and pip install onnxruntime {package}, which is the "
            "same execution provider as a plugin"
        )
        found.append(Finding(WARNING, name, text, hint))
    for package in _child("packages").get("packages", []):
        told = _child("package", package, socket)
        if error := told.get("error"):
            found.append(
                Finding(PROBLEM, package, error, "reinstall the package, or another version of it")
            )
        for one in told.get("providers", []):
            finding = _execution_provider(package, one)
            usable += finding.severity == OK
            found.append(finding)
    if not usable:
        text = "none that the cache supports is installed"
        found.append(
            Finding(
                PROBLEM,
                "execution providers",
                text,
                "for example: pip install onnxruntime-ep-openvino",
            )
        )


def _execution_provider(package: str, told: dict[str, Any]) -> Finding:
    subject = told["name"]
    if error := told.get("error"):
        severity = WARNING if "no device" in error else PROBLEM
        return Finding(severity, subject, f"{package}: {error}", told.get("hint", ""))
    text = (
        f"{told['library']}, version {told['version'] or 'unknown'}, on "
        f"{', '.join(told['devices'])}"
    )
    if refusal := told.get("refusal"):
        return Finding(
            PROBLEM,
            subject,
            f"{text}; the daemon does not serve it: {refusal}",
            told.get("hint", ""),
        )
    return Finding(OK, subject, text + ("; the daemon serves it" if told.get("decision") else ""))


def _child(*arguments: str) -> dict[str, Any]:
    """Has a process of its own look, and returns what it tells; an `error` where it does not get to
    that.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    command = [sys.executable, "-c", _CHILD, *arguments]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHILD_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"loading it did not end within {CHILD_LIMIT:.0f} s"}
    except OSError as error:
        return {"error": f"{sys.executable}: {error.strerror}"}
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            told: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return told
    words = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    how = (
        _worker.signal_name(-done.returncode)
        if done.returncode < 0
        else f"status {done.returncode}"
    )
    return {"error": f"it crashes the process that loads it, with {how}: {words}"}


def client(socket: str) -> Client:
    """Returns whom the child asks: that daemon, which has answered before."""
    return Client(socket, CHILD_LIMIT / 2, hello_limit=CONNECT_LIMIT)
