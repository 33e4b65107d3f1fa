"""The errors: one class for each error class of the protocol, and two (NoDaemon, ProtocolError)
that only clients raise.
"""

from __future__ import annotations

from collections.abc import Mapping


def printable(text: str) -> str:
    """Returns the text with escapes instead of characters that could control a terminal or reorder
    what it shows. The names of models and the messages of execution providers may have these.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


class Error(Exception):
    """The base class of this package's errors.

    `text` says what failed, `hint` what to do (may be empty), and `facts` has details by name:
    "request_key", "build", "code", "file", "field", "offset" and others.
    """

    def __init__(self, text: str, hint: str = "", facts: Mapping[str, str] | None = None) -> None:
        self.text = printable(text)
        self.hint = printable(hint)
        super().__init__(f"{self.text} ({self.hint})" if hint else self.text)
        self.facts = dict(facts or {})


class NotFound(Error):
    """There is no such build, and the request did not permit a compile."""


class Stale(Error):
    """There is a build, but it must not be loaded."""


class CompileFailed(Error):
    """The compile failed; the text ends with the compiler's message."""


class Busy(Error):
    """The daemon's queue or this user's part of it is full: retry later."""


class DeadlineExceeded(Error):
    """The timeout of the call has passed."""


class BadModel(Error):
    """The model is invalid; the facts name field, file and offset."""


class BadRequest(Error):
    """The request is invalid: an unknown option, a descriptor that is no regular file."""


class NotAllowed(Error):
    """This user does not have the permission."""


class NoSpace(Error):
    """There is no space for the artefact: budget, quota or disk."""


class VersionMismatch(Error):
    """Client and daemon have different versions of the protocol."""


class Unavailable(Error):
    """The execution provider, its library or its device is missing."""


class Internal(Error):
    """An internal error of the daemon; its log says more."""


class Cancelled(Error):
    """The request was cancelled."""


class NoDaemon(Error):
    """No daemon answered in time, or it stopped and did not come back."""


class ProtocolError(Error):
    """The peer violated the protocol."""


class EpcacheWarning(RuntimeWarning):
    """A session is not from the cache; the text has the reason."""


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
    """Returns the error for a class number of the protocol. A number from a later version is an
    Internal error.
    """
    return _CLASSES.get(number, Internal)(text or "the daemon gave no reason", hint, facts)
