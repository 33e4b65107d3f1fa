"""SessionOptions that remember what they are told.

ONNX Runtime's own cannot be read back: it does not show which session config entries, fixed
dimensions or execution providers it carries. A cache that guessed would serve the wrong artefact.
So this subclass notes each call and each assignment, also those of a later ONNX Runtime. What they
mean is found out where a session is made (_record.py): programs make options that they never use,
and import this class long before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._onnxruntime import ort

if TYPE_CHECKING:
    from ._record import Record

# Reading them changes nothing.
_READERS = frozenset(("get_session_config_entry", "has_providers"))


class SessionOptions(ort.SessionOptions):  # type: ignore[misc]
    """ONNX Runtime's SessionOptions, which also records the values that are set.

    Session config entries, free dimensions, the optimisation level, devices and a device policy are
    part of the request. Options that only affect how a model runs (threads, logging, profiling,
    memory) are not, and are set on the session that loads the compiled form. Any other option, such
    as custom operator libraries or initializers in memory, makes a plain session, with the reason
    in `session.epcache.why`.
    """

    # No __dict__, as in the class above: a misspelled attribute is an error and not a new one.
    __slots__ = ("_calls",)
    _calls: list[tuple[str, tuple[Any, ...]]]  # every method call and, as "=name", assignment

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "_calls", [])

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._calls.append((f"={name}", (value,)))

    @property
    def _record(self) -> Record:
        """What these options have been told so far."""
        from ._record import record_of

        return record_of(self._calls)


def _remembering(name: str) -> Callable[..., Any]:
    plain = getattr(ort.SessionOptions, name)

    def method(self: SessionOptions, *arguments: Any, **named: Any) -> Any:
        result = plain(self, *arguments, **named)  # first: what it refuses was not told
        self._calls.append((name, tuple(_kept(one) for one in (*arguments, *named.values()))))
        return result

    method.__name__, method.__doc__ = name, plain.__doc__
    return method


def _kept(argument: Any) -> Any:
    """The caller may change a list or a table afterwards, which tells the options nothing."""
    return argument.copy() if type(argument) in (list, dict) else argument


# Every method there is, also those of a later ONNX Runtime than this was written for: none goes
# unnoticed.
for _name in dir(ort.SessionOptions):
    if (
        not _name.startswith("_")
        and _name not in _READERS
        and callable(getattr(ort.SessionOptions, _name))
    ):
        setattr(SessionOptions, _name, _remembering(_name))
