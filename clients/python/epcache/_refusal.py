"""What ONNX Runtime has against an artefact, and what the daemon makes of that."""

from __future__ import annotations

import re
from typing import NamedTuple

from . import _errors, _wire
from ._fields import dataclass

# "[ONNXRuntimeError] : 10 : INVALID_GRAPH : Load model from ... failed: ..."
_MESSAGE = re.compile(r"\[ONNXRuntimeError\] : (\d{1,9}) : ")

# As ONNX Runtime's C interface calls a C++ exception that has no code of its own.
_RUNTIME_EXCEPTION = 6

MAX_TEXT = 4096  # bytes of a text that a report keeps


class Refusal(NamedTuple):
    """Why an artefact did not load. Without a code it is no word of ONNX Runtime's, and says
    nothing of the artefact.
    """

    code: int | None  # OrtErrorCode; 0: it loaded, and does not run on its execution provider
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
    class_: str = ""  # what code and text are taken for: "stale", "not stale", "unclear"
    state: str = ""  # of the build now: "current", "withheld", "damaged", "withheld from you"

    def __str__(self) -> str:
        text = f"{self.decision}: {self.text}" if self.text else self.decision
        return f"{text} ({self.hint})" if self.hint else text


def decision(message: _wire.Message) -> Decision:
    return Decision(
        message["decision"],
        message["text"],
        message["hint"],
        class_=message["class"],
        state=message["state"],
    )


def refusal_of(error: Exception) -> Refusal:
    """Returns what an error says of the artefact that was being loaded."""
    text = str(error)
    if found := _MESSAGE.search(text):
        return Refusal(int(found[1]), text)
    if isinstance(error, _errors.Unavailable):
        return Refusal(0, text)
    return Refusal(_RUNTIME_EXCEPTION if isinstance(error, RuntimeError) else None, text)


def sendable(text: str) -> str:
    """Returns the beginning of a text as a report can carry it: whole characters, in UTF-8."""
    return text.encode("utf-8", "replace")[:MAX_TEXT].decode("utf-8", "ignore")
