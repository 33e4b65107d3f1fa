"""Starts the user's own daemon if none answers, so that no service has to be installed.

A lock beside the socket makes sure that only one of several processes does so. It runs `epcached
--autostart`, which starts the daemon detached from this application (own session, no inherited
descriptors, not a child of this process), reports when the daemon answers or why it does not, and
exits. The daemon exits by itself when it has been unused for a while.
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

PATIENCE = 10.0  # seconds that a request that waits for a compile waits for a daemon's start
# seconds for which a daemon counts as new: it may be slow to answer, because of its first requests
NEW_SECONDS = 30.0
RETRY_AFTER = 30.0  # seconds before a failed start is retried
PAUSE = 0.003
MAX_SOCKET_PATH = 107
MAX_REASON = 1024
# in the reasons for which only the calling program cannot start a daemon
OF_THIS_PROGRAM = "the program that starts it has"

Dial = Callable[[str], Connection]


def user_sockets() -> list[str]:
    """Returns the sockets of the user's own daemon: in the runtime directory, then in the state
    directory.
    """
    directories = []
    runtime, state = os.environ.get("XDG_RUNTIME_DIR", ""), os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(runtime):
        directories.append(runtime)
    if not os.path.isabs(state):
        home = os.environ.get("HOME", "")  # only this, as in the daemon and all clients
        state = os.path.join(home, ".local", "state") if os.path.isabs(home) else ""
    if state:
        directories.append(state)
    return [os.path.join(directory, "epcached", "epcached.sock") for directory in directories]


def is_foreign(path: str) -> bool:
    """Whether the socket is in another user's directory. Such a daemon is not trusted. With sudo,
    HOME is another user's.
    """
    try:
        return os.stat(os.path.dirname(path)).st_uid != os.geteuid()
    except OSError:
        return False


def is_absent(path: str, error: BaseException, system: bool) -> bool:
    """Whether a connection failed because there is no daemon, and not because the daemon is
    suspended or refuses.

    If a system daemon's socket exists, the daemon is assumed to restart, because a daemon per user
    would not share its cache.
    """
    if system or not os.path.lexists(path):
        return not os.path.lexists(path)  # the error may be a timeout before the first try
    if error.__cause__ is None:
        return isinstance(error, Lost)  # it closed the connection at once: it was exiting
    return isinstance(
        error.__cause__, (FileNotFoundError, NotADirectoryError, ConnectionError, PermissionError)
    )


def new_daemon_seconds(path: str) -> float:
    """Returns the seconds to wait for a new daemon, which may be busy with its first requests."""
    if path not in user_sockets():
        return 0.0
    try:
        return max(0.0, min(PATIENCE, NEW_SECONDS - abs(time.time() - os.stat(path).st_mtime)))
    except OSError:
        return 0.0


def enabled() -> bool:
    return os.environ.get(VARIABLE, "1").lower() not in ("0", "no", "off", "false")


def find() -> str:
    """Returns the path of the daemon's program: EPCACHE_DAEMON, else the installed one; "" if there
    is none.
    """
    return _programs.find(PROGRAM, PROGRAM_VARIABLE, DIRECTORIES)


def find_epcachectl() -> str:
    """Returns the path of epcachectl: beside the daemon's program, else in PATH; "" if there is
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
    """Returns a connection to the daemon that this or another process starts, None if there is no
    program to start.

    Raises NoDaemon, with the reason, if the start failed or takes longer than `until`, a time of
    time.monotonic().
    """
    program = find()
    if not program:
        return None
    if not os.path.isdir("/proc/self/fd"):
        raise _errors.NoDaemon(
            f"cannot start a daemon: /proc is not mounted; mount it, or set {VARIABLE}=0"
        )
    socket, reason = _usable_socket()
    if not socket:
        raise _errors.NoDaemon(f"cannot start a daemon: {reason}")
    with contextlib.ExitStack() as stack:
        try:
            lock = os.open(
                socket + ".start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as error:
            raise _errors.NoDaemon(f"cannot start a daemon: {error}") from error
        stack.callback(os.close, lock)
        while not _locked(lock):
            # Read before the attempt, because this process may not run for a while after it.
            late = time.monotonic() >= until
            if connection := _try_connect(dial, socket):
                return connection
            if late:
                raise _errors.NoDaemon("a daemon is being started, but does not answer yet")
            time.sleep(PAUSE)
        if connection := _try_connect(dial, socket):
            return connection
        if failed := _recent_failure(lock):
            raise _errors.NoDaemon(f"cannot start a daemon: {failed}")
        try:
            connection = _Starter(program, socket).wait(dial, until)
        except _StartFailed as error:
            _record_failure(lock, "" if OF_THIS_PROGRAM in str(error) else str(error))
            raise _errors.NoDaemon(f"cannot start a daemon: {error}") from None
        _record_failure(lock, "")
        return connection


class _StartFailed(Exception):
    pass


def _usable_socket() -> tuple[str, str]:
    """Returns the socket in the first directory that only this user can write, or the reasons."""
    reasons = ["there is no home directory"]
    for path in user_sockets():
        directory = os.path.dirname(path)
        try:
            if len(os.fsencode(path)) > MAX_SOCKET_PATH:
                raise OSError(
                    errno.ENAMETOOLONG,
                    "the path is too long for a socket, so set XDG_RUNTIME_DIR to a short one",
                    path,
                )
            _create_directory(
                directory,
                parent_exists=directory.startswith(os.environ.get("XDG_RUNTIME_DIR") or "\0"),
            )
            return path, ""
        except OSError as error:
            reasons.append(str(error))
            if error.errno in (errno.EROFS, errno.EACCES, errno.ENOENT):
                reasons[-1] += "; set XDG_STATE_HOME to a directory of this user"
    return "", reasons[-1]


def _create_directory(directory: str, parent_exists: bool) -> None:
    """Creates the directory for this user only, if it does not exist. Raises OSError if it, or the
    directory to create it in, is owned by another user.
    """
    if not os.path.isdir(directory):
        above = os.path.dirname(directory)
        while not parent_exists and not os.path.exists(above):
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
        raise _errors.NoDaemon(f"cannot start a daemon: {error}") from error
    return True


def _try_connect(dial: Dial, socket: str) -> Connection | None:
    with contextlib.suppress(Lost, _errors.DeadlineExceeded):
        return dial(socket)
    return None


def _recent_failure(lock: int) -> str:
    """Returns why the last start failed, if that was less than RETRY_AFTER ago; otherwise every
    waiting process would retry it.
    """
    info = os.fstat(lock)
    if not info.st_size or not 0 <= time.time() - info.st_mtime < RETRY_AFTER:
        return ""
    return os.pread(lock, MAX_REASON, 0).decode(errors="replace")


def _record_failure(lock: int, reason: str) -> None:
    with contextlib.suppress(OSError):  # best effort: if the disk is full, the next process retries
        os.ftruncate(lock, 0)
        os.pwrite(lock, reason.encode(errors="replace")[:MAX_REASON], 0)


class _Starter:
    """A running `epcached --autostart`. It exits when the daemon answers, or prints the reason."""

    def __init__(self, program: str, socket: str) -> None:
        import signal  # only here, because an application that finds a daemon does not need it

        self._program, self._socket = program, socket
        with contextlib.ExitStack() as stack:
            devnull = _programs.move_above_10(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
            stack.callback(os.close, devnull)
            output, written = os.pipe()
            self._output = _programs.move_above_10(output)
            written = _programs.move_above_10(written)
            stack.callback(os.close, written)
            descriptors = (devnull, devnull, written)
            try:
                self._pid = os.posix_spawn(
                    program,
                    [program, "--autostart", "--socket", socket],
                    os.environ,
                    file_actions=_programs.only_descriptors(descriptors),
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
                os.close(self._output)
                raise _StartFailed(f"{program}: {error.strerror}") from error

    def wait(self, dial: Dial, until: float) -> Connection:
        """Returns a connection to the daemon as soon as it answers."""
        reaped = False
        try:
            while True:
                late = time.monotonic() >= until
                connection = _try_connect(dial, self._socket)
                if connection is not None:
                    return connection
                if reaped:
                    raise _StartFailed(self._reason())
                if late:
                    raise _errors.NoDaemon("a daemon is being started, but does not answer yet")
                reaped = self._ended(os.WNOHANG)
                time.sleep(0.0 if reaped else PAUSE)
        finally:
            os.close(self._output)
            if not reaped and not self._ended(os.WNOHANG):
                import threading

                threading.Thread(
                    target=self._ended, args=(0,), name="epcache-autostart", daemon=True
                ).start()

    def _ended(self, flags: int) -> bool:
        try:
            return os.waitpid(self._pid, flags)[0] != 0
        except ChildProcessError:
            return True  # the application reaped it, or ignores SIGCHLD

    def _reason(self) -> str:
        text = os.read(self._output, 4096).decode(errors="replace").strip()
        named = f" (set by {PROGRAM_VARIABLE})" if os.environ.get(PROGRAM_VARIABLE) else ""
        return (
            text.partition("\n")[0].removeprefix("epcached: ")
            or f"{self._program} ended without a message{named}"
        )
