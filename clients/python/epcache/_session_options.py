"""SessionOptions that record all calls.

ONNX Runtime's class has no getters for session config entries, fixed dimensions and execution
providers, and a cache that guessed them would serve the wrong artefact. So this subclass records
each call and assignment, including those of a later ONNX Runtime. _record.py interprets them when a
session is made, because programs import this class and make options without making a session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._onnxruntime import ort

if TYPE_CHECKING:
    from ._record import Record

# Methods that are not recorded, because they change nothing.
_READERS = frozenset(("get_session_config_entry", "has_providers"))


class SessionOptions(ort.SessionOptions):  # type: ignore[misc]
    """ONNX Runtime's SessionOptions, which also records the values that are set.

    Session config entries, free dimensions, the optimisation level, devices and a device policy are
    part of the request. Options that only affect how a model runs (threads, logging, profiling,
    memory) are not, and are set on the session that loads the compiled form. Any other option, such
    as custom operator libraries or initializers in memory, makes a plain session, with the reason
    in `session.epcache.why`.
    """

    # No __dict__, as in the base class, so that a misspelled attribute is an error.
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
        """The interpretation of all calls so far."""
        from ._record import record_of

        return record_of(self._calls)


def _recording(name: str) -> Callable[..., Any]:
    plain = getattr(ort.SessionOptions, name)

    def method(self: SessionOptions, *arguments: Any, **named: Any) -> Any:
        result = plain(self, *arguments, **named)  # first, because a refused call has no effect
        self._calls.append((name, tuple(_copied(one) for one in (*arguments, *named.values()))))
        return result

    method.__name__, method.__doc__ = name, plain.__doc__
    return method


def _copied(argument: Any) -> Any:
    """Returns a copy of a list or dict, because the caller may change it after the call."""
    return argument.copy() if type(argument) in (list, dict) else argument


# Wraps every method, including those of a later ONNX Runtime.
for _name in dir(ort.SessionOptions):
    if (
        not _name.startswith("_")
        and _name not in _READERS
        and callable(getattr(ort.SessionOptions, _name))
    ):
        setattr(SessionOptions, _name, _recording(_name))
