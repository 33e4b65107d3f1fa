"""What can go wrong, as classes: one for each error class of the protocol, and two that never cross the socket."""

from __future__ import annotations

from collections.abc import Mapping


class Error(Exception):
    """The base of every error that this package raises on its own account.

    `text` says what happened to what, `hint` what to do about it (may be empty), and `facts` holds the particulars
    by name: "request_key", "build", "code", "file", "field", "offset" and others.
    """

    def __init__(self, text: str, hint: str = "", facts: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{text} ({hint})" if hint else text)
        self.text = text
        self.hint = hint
        self.facts = dict(facts or {})


class NotFound(Error):
    """There is no such build, and the request said not to make one."""


class Stale(Error):
    """There is a build, and it must not be loaded."""


class CompileFailed(Error):
    """The compile failed; the text ends with the compiler's own last words."""


class Busy(Error):
    """The daemon has as much to do as it accepts."""


class DeadlineExceeded(Error):
    """The time that was given for the call is over."""


class BadModel(Error):
    """The model is not sound; the facts name field, file and offset."""


class BadRequest(Error):
    """The request makes no sense to the daemon: an unknown option, a descriptor that is no regular file."""


class NotAllowed(Error):
    """This user may not do that."""


class NoSpace(Error):
    """There is no room for the artefact."""


class VersionMismatch(Error):
    """Client and daemon do not speak the same version of the protocol."""


class Unavailable(Error):
    """The execution provider, its library or a device for it is not there."""


class Internal(Error):
    """The daemon failed in a way that is its own fault."""


class Cancelled(Error):
    """The request was given up."""


class NoDaemon(Error):
    """No daemon answered in time, or it went away and did not come back."""


class ProtocolError(Error):
    """What came over the socket is not the protocol."""


class EpcacheWarning(RuntimeWarning):
    """A session works, but not from the cache; the text says why."""


_CLASSES: dict[int, type[Error]] = {
    1: NotFound,
    2: Stale,
    3: CompileFailed,
    4: Busy,
    5: DeadlineExceeded,
    6: BadModel,
    7: BadRequest,
    8: NotAllowed,
    9: NoSpace,
    10: VersionMismatch,
    11: Unavailable,
    12: Internal,
    13: Cancelled,
}


def from_wire(number: int, text: str, hint: str, facts: Mapping[str, str]) -> Error:
    """Returns the error for a class number of the protocol. A number from a later version is an Internal error."""
    return _CLASSES.get(number, Internal)(text or "the daemon gave no reason", hint, facts)
