"""python -m epcache doctor: checks what this Python's sessions would use, and finds problems.

epcachectl checks the daemon and the machine if it is installed; otherwise this module checks the
daemon. ONNX Runtime and each package of an execution provider are loaded in a child process,
because they may crash.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from . import _autostart, _errors, _machine, _worker
from ._client import Client
from ._connection import Connection, Limit
from ._connections import SOCKET_VARIABLE, SYSTEM_SOCKET, default_sockets
from ._version import __version__

OK, INFO, WARNING, PROBLEM = "ok", "info", "warning", "problem"
DONE, FAILED, NO_DAEMON = 0, 1, 5  # exit statuses, those of epcachectl
REFUSALS = ("protocol", "rights")  # subjects about a daemon that answers

OLDEST = (1, 24)  # of ONNX Runtime
# seconds; longer than a session waits, to distinguish a slow daemon from a missing one
CONNECT_LIMIT = 2.0
CHILD_LIMIT = 60.0  # seconds
MARK = "epcache-doctor:"  # starts the result line, because vendors' libraries print lines too
_CHILD = "import sys; from epcache import _doctor_child as d; d.tell(*sys.argv[1:])"


@dataclass(frozen=True)
class Finding:
    """The result of one check. The names are those of epcachectl doctor --json."""

    severity: str  # "ok", "info", "warning", "problem"
    subject: str
    text: str
    hint: str = ""
    side: str = "application"  # "client": about the daemon; "application": about this Python


def run(socket: str, as_json: bool, application: bool) -> int:
    """Prints the findings and returns the exit status. With `application` only this Python is
    checked.
    """
    found, answering = check(socket, application)
    counts = {
        severity: sum(one.severity == severity for one in found)
        for severity in (PROBLEM, WARNING, INFO, OK)
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
        for one in sorted(found, key=lambda one: (PROBLEM, WARNING, INFO, OK).index(one.severity)):
            print(_errors.printable(f"{one.severity:8} {one.subject}: {one.text}"))
            if one.hint:
                print(_errors.printable(f"{'':8} -> {one.hint}"))
        problems, warnings = (
            f"{number} {what}{'' if number == 1 else 's'}"
            for what, number in counts.items()
            if what in (PROBLEM, WARNING)
        )
        good = counts[OK] + counts[INFO] == len(found)
        print("no problems found" if good else f"{problems}, {warnings}")
    if not answering and any(
        one.side == "client" and one.severity == PROBLEM and one.subject not in REFUSALS
        for one in found
    ):
        return NO_DAEMON
    return FAILED if counts[PROBLEM] else DONE


def check(socket: str = "", application: bool = False) -> tuple[list[Finding], str]:
    """Returns the findings, and the socket of the daemon that answers, "" if none does."""
    seen: list[Finding] = []
    answering = _check_daemon(seen, socket)
    found = [] if application else _check_machine(socket) or seen
    found.append(_check_worker())
    if (built_in := _check_onnxruntime(found)) is not None:
        _check_execution_providers(found, answering, built_in)
    return found, answering


def _check_machine(socket: str) -> list[Finding]:
    """Returns the findings of epcachectl about daemon, configuration and machine; none if it is not
    installed.
    """
    program = _autostart.find_epcachectl()
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
                f"{program} doctor failed: {error}",
                "install epcachectl and epcache of the same release",
                "client",
            )
        ]
    return [
        one if one.severity in (OK, INFO, WARNING, PROBLEM) else replace(one, severity=OK)
        for one in found
    ]


def _check_daemon(found: list[Finding], named: str) -> str:
    """Checks the daemon that a session would use, and returns its socket; "" if none answers."""
    failed, absent = [], True
    for path in [named] if named else default_sockets():
        started = time.monotonic()
        try:
            limit = Limit(started + CONNECT_LIMIT)
            connection = Connection(path, limit, f"python epcache {__version__} doctor")
        except _errors.Error as error:
            failed.append(str(error))
            absent = absent and _autostart.is_absent(path, error, path == SYSTEM_SOCKET)
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
    elif not _autostart.enabled():
        hint = f"start epcached; sessions do not start one because {_autostart.VARIABLE} is off"
    elif not program:
        hint = (
            "start epcached, or install a wheel that contains the programs, so that sessions can "
            "start one"
        )
    else:
        found.append(
            Finding(
                OK,
                "daemon",
                f"not running; the first session starts {program}",
                f"looked for: {reason}",
                "client",
            )
        )
        return ""
    found.append(
        Finding(
            PROBLEM,
            "daemon",
            f"no daemon answers, so each session compiles its model itself: {reason}",
            hint,
            "client",
        )
    )
    return ""


def _check_worker() -> Finding:
    program = _worker.find()
    text = (
        f"on_miss='claim' compiles in {program}"
        if program
        else "not found; on_miss='claim' compiles in the application's own process"
    )
    return Finding(OK, "worker", text)


def _check_onnxruntime(found: list[Finding]) -> list[str] | None:
    """Checks ONNX Runtime. Returns the execution providers that are built into it; None if it is
    missing or too old for others.
    """
    from importlib import metadata

    owners = sorted(set(metadata.packages_distributions().get("onnxruntime", [])))
    if len(owners) > 1:
        text = f"several installed packages overwrite each other: {', '.join(owners)}"
        found.append(
            Finding(PROBLEM, "onnxruntime", text, "uninstall all of them, and install one")
        )
    result = _run_child("onnxruntime")
    if error := result.get("error"):
        found.append(Finding(PROBLEM, "onnxruntime", error, "pip install onnxruntime"))
        return None
    providers = ", ".join(result["providers"])
    text = f"{result['version']} in {result['directory']}, with {providers} built in"
    if (
        tuple(int(part) for part in result["version"].split(".")[:2]) < OLDEST
        or not result["plugins"]
    ):
        hint = (
            f"version {'.'.join(map(str, OLDEST))} or later is needed for plugin execution "
            "providers"
        )
        found.append(Finding(PROBLEM, "onnxruntime", text, hint))
        return None
    found.append(Finding(OK, "onnxruntime", text))
    return [str(name) for name in result["providers"]]


def _check_execution_providers(found: list[Finding], socket: str, built_in: list[str]) -> None:
    usable, without = 0, ""
    for name, package in _run_child("built in", *built_in).get("plugins", {}).items():
        text = (
            "built into this ONNX Runtime, so the daemon cannot compile for it: its sessions do "
            "not use the cache, except with on_miss='claim'"
        )
        hint = (
            f"uninstall this ONNX Runtime, then pip install onnxruntime {package}: the plugin of "
            "the same execution provider"
        )
        found.append(Finding(WARNING, name, text, hint))
    for package in _run_child("packages").get("packages", []):
        result = _run_child("package", package, socket)
        if error := result.get("error"):
            found.append(
                Finding(PROBLEM, package, error, "reinstall the package, or another version of it")
            )
        for one in result.get("providers", []):
            finding = _execution_provider(package, one)
            usable += finding.severity == OK
            if one.get("facts", {}).get("devices") == "0":
                without = one["name"]
            found.append(finding)
    package = _machine.installable()
    if without and not usable:
        text = f"{without} has no device here, so sessions with it are plain ones on the CPU"
        hint = (
            f"only with another device, or ahead of time: pip install {package}" if package else ""
        )
        found.append(Finding(WARNING, "execution providers", text, hint))
    elif not usable:
        text = "none that the cache supports is installed"
        hint = (
            f"for example: pip install {package}" if package else "none is known for this machine"
        )
        found.append(Finding(PROBLEM, "execution providers", text, hint))


def _execution_provider(package: str, result: dict[str, Any]) -> Finding:
    subject = result["name"]
    if error := result.get("error"):
        no_device = result.get("facts", {}).get("devices") == "0"
        severity = WARNING if no_device else PROBLEM
        return Finding(severity, subject, f"{package}: {error}", result.get("hint", ""))
    text = (
        f"{result['library']}, version {result['version'] or 'unknown'}, on "
        f"{', '.join(result['devices'])}"
    )
    if refusal := result.get("refusal"):
        return Finding(
            PROBLEM,
            subject,
            f"{text}; the daemon does not serve it: {refusal}",
            result.get("hint", ""),
        )
    text += "; the daemon serves it" if result.get("decision") else ""
    hint = (
        "a plain session that only names it in providers= runs on the CPU: use "
        f"epcache.InferenceSession(model, ep={subject!r})"
    )
    return Finding(OK, subject, text, hint)


def _run_child(*arguments: str) -> dict[str, Any]:
    """Runs a check in a child process and returns its result, which has an `error` if the process
    failed.
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
        return {"error": f"loading it takes more than {CHILD_LIMIT:.0f} s"}
    except OSError as error:
        return {"error": f"{sys.executable}: {error.strerror}"}
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return result
    words = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    how = (
        _worker.signal_name(-done.returncode)
        if done.returncode < 0
        else f"status {done.returncode}"
    )
    return {"error": f"loading it crashes the process, with {how}: {words}"}


def client(socket: str) -> Client:
    """Returns the child's client, with the daemon that answered the parent."""
    return Client(socket, CHILD_LIMIT / 2, hello_limit=CONNECT_LIMIT)
