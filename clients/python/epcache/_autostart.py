"""Starts the user's own daemon if none answers, so that no service has to be installed.

One process does it for all that ask at the same time: it holds a lock beside the socket. What it
starts is `epcached --autostart`, which starts the daemon apart from this application (a session of
its own, nothing inherited, no child of this process), says when that answers or why it does not,
and ends. The daemon exits by itself when it was unused for a while.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable

from . import _errors, _programs
from ._connection import Connection, Lost

VARIABLE = "EPCACHE_AUTOSTART"
PROGRAM, CONTROL = "epcached", "epcachectl"
PROGRAM_VARIABLE = "EPCACHE_DAEMON"
DIRECTORIES = ("/usr/bin", *_programs.DIRECTORIES)

PATIENCE = 10.0  # seconds that a request which waits for a compile waits for a daemon's start
# seconds that a new daemon may be busy with its first requests: a hundred on a slow machine
NEW_FOR = 30.0
AGAIN_AFTER = 30.0  # seconds before a failed start is retried
PAUSE = 0.003
MAX_SOCKET_PATH = 107
MAX_REASON = 1024

Dial = Callable[[str], Connection]


def user_sockets() -> list[str]:
    """Returns where the user's own daemon may listen: in the runtime directory, then in the state
    directory.
    """
    directories = []
    runtime, state = os.environ.get("XDG_RUNTIME_DIR", ""), os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(runtime):
        directories.append(runtime)
    if not os.path.isabs(state):
        home = os.environ.get("HOME", "")  # and nothing else, as all clients and the daemon have it
        state = os.path.join(home, ".local", "state") if os.path.isabs(home) else ""
    if state:
        directories.append(state)
    return [os.path.join(directory, "epcached", "epcached.sock") for directory in directories]


def foreign(path: str) -> bool:
    """Reports a socket in another user's directory, whose daemon is not trusted. With sudo, HOME is
    another user's.
    """
    try:
        return os.stat(os.path.dirname(path)).st_uid != os.geteuid()
    except OSError:
        return False


def absent(path: str, error: BaseException, system: bool) -> bool:
    """Tells whether a connection failed because no daemon is there, and not because one is stopped
    or refuses.

    A system's daemon that left its socket is about to come back, and its users are not to be
    scattered.
    """
    if system or not os.path.lexists(path):
        return not os.path.lexists(path)  # the error may be that there was no time left to look
    if error.__cause__ is None:
        return isinstance(error, Lost)  # it closed the connection at once: it was just leaving
    return isinstance(
        error.__cause__, (FileNotFoundError, NotADirectoryError, ConnectionError, PermissionError)
    )


def youth(path: str) -> float:
    """Returns the seconds to wait for a new daemon, which may be busy with its first requests."""
    if path not in user_sockets():
        return 0.0
    try:
        return max(0.0, min(PATIENCE, NEW_FOR - abs(time.time() - os.stat(path).st_mtime)))
    except OSError:
        return 0.0


def switched_on() -> bool:
    return os.environ.get(VARIABLE, "1").lower() not in ("0", "no", "off", "false")


def find() -> str:
    """Returns the daemon's program, "" where there is none: EPCACHE_DAEMON, else where this
    package's programs were put.
    """
    return _programs.find(PROGRAM, PROGRAM_VARIABLE, DIRECTORIES)


def control() -> str:
    """Returns epcachectl: the one beside the daemon's program, else in PATH; "" where there is
    none.
    """
    import shutil

    beside = os.path.join(os.path.dirname(find()), CONTROL)
    return (
        beside
        if os.path.isabs(beside) and os.access(beside, os.X_OK)
        else shutil.which(CONTROL) or ""
    )


def connect(dial: Dial, until: float) -> Connection | None:
    """Returns a connection to the daemon that this or another process starts, None where nothing
    can be started here.

    Raises NoDaemon, with the reason, where that failed or takes longer than `until`, a time of
    time.monotonic().
    """
    program = find()
    if not program:
        return None
    socket, reason = _place()
    if not socket:
        raise _errors.NoDaemon(f"no daemon can be started: {reason}")
    with contextlib.ExitStack() as stack:
        try:
            lock = os.open(
                socket + ".start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as error:
            raise _errors.NoDaemon(f"no daemon can be started: {error}") from error
        stack.callback(os.close, lock)
        while not _locked(lock):
            if connection := _try(dial, socket):
                return connection
            if time.monotonic() >= until:
                raise _errors.NoDaemon("one is being started, and does not answer yet")
            time.sleep(PAUSE)
        if connection := _try(dial, socket):
            return connection
        if failed := _failed(lock):
            raise _errors.NoDaemon(f"no daemon can be started: {failed}")
        try:
            connection = _Starter(program, socket).wait(dial, until)
        except _Failed as error:
            _note(lock, str(error))
            raise _errors.NoDaemon(f"no daemon can be started: {error}") from None
        _note(lock, "")
        return connection


class _Failed(Exception):
    pass


def _place() -> tuple[str, str]:
    """Returns the socket in the first directory that only this user can write, or the reasons."""
    reasons = ["there is no home directory"]
    for path in user_sockets():
        directory = os.path.dirname(path)
        try:
            if len(os.fsencode(path)) > MAX_SOCKET_PATH:
                raise OSError(errno.ENAMETOOLONG, "the path is too long for a socket", path)
            _own(
                directory,
                made_by_others=directory.startswith(os.environ.get("XDG_RUNTIME_DIR") or "\0"),
            )
            return path, ""
        except OSError as error:
            reasons.append(str(error))
    return "", reasons[-1]


def _own(directory: str, made_by_others: bool) -> None:
    """Makes the directory for this user alone. Raises OSError for one that is another's, and where
    only another's could hold it.
    """
    if not os.path.isdir(directory):
        above = os.path.dirname(directory)
        while not made_by_others and not os.path.exists(above):
            above = os.path.dirname(above)
        if os.stat(above).st_uid not in (0, os.geteuid()):
            raise PermissionError(
                errno.EPERM, "the directory above is owned by another user", directory
            )
        os.makedirs(directory, mode=0o700, exist_ok=True)
    info = os.stat(directory)
    if info.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "the directory is owned by another user", directory)
    if info.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "other users may write to the directory", directory)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        raise _errors.NoDaemon(f"no daemon can be started: {error}") from error
    return True


def _try(dial: Dial, socket: str) -> Connection | None:
    with contextlib.suppress(Lost, _errors.DeadlineExceeded):
        return dial(socket)
    return None


def _failed(lock: int) -> str:
    """Returns why the last start failed, if that was a moment ago: a hundred processes are not to
    try it one after the other.
    """
    info = os.fstat(lock)
    if not info.st_size or not 0 <= time.time() - info.st_mtime < AGAIN_AFTER:
        return ""
    return os.pread(lock, MAX_REASON, 0).decode(errors="replace")


def _note(lock: int, reason: str) -> None:
    with contextlib.suppress(OSError):  # a full disk: then the next one tries
        os.ftruncate(lock, 0)
        os.pwrite(lock, reason.encode(errors="replace")[:MAX_REASON], 0)


class _Starter:
    """`epcached --autostart`, which ends when the daemon answers, or says why it does not."""

    def __init__(self, program: str, socket: str) -> None:
        import signal  # only here: an application that finds a daemon does not need it

        self._program, self._socket = program, socket
        with contextlib.ExitStack() as stack:
            nothing = _programs.high(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
            stack.callback(os.close, nothing)
            answers, said = os.pipe()
            self._answers = _programs.high(answers)
            said = _programs.high(said)
            stack.callback(os.close, said)
            given = (nothing, nothing, said)
            try:
                self._pid = os.posix_spawn(
                    program,
                    [program, "--autostart", "--socket", socket],
                    os.environ,
                    file_actions=_programs.exactly(given),
                    setsid=True,
                    setsigmask=[],
                    setsigdef=[
                        signal.SIGCHLD,
                        signal.SIGHUP,
                        signal.SIGINT,
                        signal.SIGPIPE,
                        signal.SIGQUIT,
                        signal.SIGTERM,
                    ],
                )
            except OSError as error:
                os.close(self._answers)
                raise _Failed(f"{program}: {error.strerror}") from error

    def wait(self, dial: Dial, until: float) -> Connection:
        """Returns a connection as soon as there is one."""
        reaped = False
        try:
            while True:
                connection = _try(dial, self._socket)
                if connection is not None:
                    return connection
                if reaped:
                    raise _Failed(self._reason())
                if time.monotonic() >= until:
                    raise _errors.NoDaemon("one is being started, and does not answer yet")
                reaped = self._ended(os.WNOHANG)
                time.sleep(0.0 if reaped else PAUSE)
        finally:
            os.close(self._answers)
            if not reaped and not self._ended(os.WNOHANG):
                import threading

                threading.Thread(
                    target=self._ended, args=(0,), name="epcache-autostart", daemon=True
                ).start()

    def _ended(self, flags: int) -> bool:
        try:
            return os.waitpid(self._pid, flags)[0] != 0
        except ChildProcessError:
            return True  # the application waits for all of its children, or ignores them

    def _reason(self) -> str:
        text = os.read(self._answers, 4096).decode(errors="replace").strip()
        named = f"; {PROGRAM_VARIABLE} names it" if os.environ.get(PROGRAM_VARIABLE) else ""
        return (
            text.partition("\n")[0].removeprefix("epcached: ")
            or f"{self._program} ended without a message{named}"
        )
