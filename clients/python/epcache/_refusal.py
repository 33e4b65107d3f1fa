"""Refusals: ONNX Runtime's error for an artefact, and the daemon's decision on it."""

from __future__ import annotations

import re
from typing import NamedTuple

from . import _errors, _wire
from ._fields import dataclass

# "[ONNXRuntimeError] : 10 : INVALID_GRAPH : Load model from ... failed: ..."
_MESSAGE = re.compile(r"\[ONNXRuntimeError\] : (\d{1,9}) : ")

# The code that ONNX Runtime's C API uses for a C++ exception without a code.
_RUNTIME_EXCEPTION = 6

MAX_TEXT = 4096  # bytes of a report's text


class Refusal(NamedTuple):
    """Why an artefact did not load. Without a code the error is not ONNX Runtime's, and proves
    nothing about the artefact.
    """

    code: int | None  # OrtErrorCode; 0: it loaded, but does not run on its execution provider
    text: str


@dataclass(frozen=True)
class Decision:
    """The daemon's decision on a report.

    `decision` is "retry" (request again), "compile_yourself" (there is nothing better) or "sound"
    (the build was verified; `text` and `hint` name other causes).
    """

    decision: str
    text: str = ""  # what was found
    hint: str = ""  # what to do
    class_: str = ""  # the daemon's interpretation of the error: "stale", "not stale", "unclear"
    state: str = ""  # of the build now: "current", "withheld", "damaged", "withheld from you"

    def __str__(self) -> str:
        text = f"{self.decision}: {self.text}" if self.text else self.decision
        return _errors.printable(f"{text} ({self.hint})" if self.hint else text)


def decision(message: _wire.Message) -> Decision:
    return Decision(
        message["decision"],
        message["text"],
        message["hint"],
        class_=message["class"],
        state=message["state"],
    )


def refusal_of(error: Exception) -> Refusal:
    """Returns the refusal for an error during the load of an artefact."""
    text = str(error)
    if found := _MESSAGE.search(text):
        return Refusal(int(found[1]), text)
    if isinstance(error, _errors.Unavailable):
        return Refusal(0, text)
    return Refusal(_RUNTIME_EXCEPTION if isinstance(error, RuntimeError) else None, text)


def sendable(text: str) -> str:
    """Returns the text, cut to the limit of a report: MAX_TEXT bytes, whole characters."""
    return text.encode("utf-8", "replace")[:MAX_TEXT].decode("utf-8", "ignore")
