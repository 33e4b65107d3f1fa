"""Explanations of the daemon's decisions: candidates, differences and history."""

from __future__ import annotations

from . import _wire
from ._events import Event, event
from ._fields import dataclass


@dataclass(frozen=True)
class Difference:
    """A field in which two requests, or two compiles, differ. "" is a missing value."""

    field: str  # such as "execution_providers[0].options.precision"
    asked: str  # the value in this request
    found: str  # the value in the other one


@dataclass(frozen=True)
class Candidate:
    """A build of the entry, and why it is served or not."""

    build: str  # build key, 64 hex digits
    served: bool  # whether the request gets this build
    reason: str  # why it is served or not, in words
    state: str  # "current", "withheld", "damaged"
    ep_version: str  # as the execution provider's library states it
    sdk_version: str  # of the vendor's SDK; "" if not known
    hardware_architecture: str  # if the EP states none, the class of the machine
    ort_version: str  # of the ONNX Runtime that compiled it
    # with the runtime: "optimal", "prefer_recompilation", "unsupported", "unknown"
    compatibility: str
    compatibility_source: str  # the source of that: "same library", "execution provider", ...
    compatibility_reason: str  # in words
    created: float  # Unix time, seconds
    differences: list[Difference]  # between a compile now and the one that made this build


@dataclass(frozen=True)
class Neighbour:
    """An entry that is similar to the request."""

    request_key: str  # 64 hex digits
    model_name: str  # of its last request
    builds: int  # how many it has
    differences: list[Difference]  # from this request


@dataclass(frozen=True)
class Explanation:
    """A decision with its reasons."""

    decision: str  # "hit", "miss", "stale", "passthrough"
    reason: str  # in words
    request_key: str  # 64 hex digits
    record: str  # the request as the daemon understood it, JSON
    runtime: str  # directory or library of the runtime that the decision is for
    candidates: list[Candidate]  # the builds of the entry, in the order of the lookup
    neighbours: list[Neighbour]  # the nearest first
    history: list[Event]  # of the entry, oldest first


def explanation(message: _wire.Message) -> Explanation:
    return Explanation(
        **{
            name: message[name]
            for name in ("decision", "reason", "request_key", "record", "runtime")
        },
        candidates=[_candidate(one) for one in message["candidates"]],
        neighbours=[
            Neighbour(one["request_key"], one["model_name"], one["builds"], _differences(one))
            for one in message["neighbours"]
        ],
        history=[event(one) for one in message["history"]],
    )


# Fields that are copied from the build without a change.
_OF_BUILD = (
    "build state ep_version sdk_version hardware_architecture ort_version compatibility "
    "compatibility_source compatibility_reason"
).split()


def _candidate(message: _wire.Message) -> Candidate:
    build = message.get("build") or _wire.decode("Build", b"")
    return Candidate(
        **{name: build[name] for name in _OF_BUILD},
        created=build["created_ms"] / 1000,
        served=message["served"],
        reason=message["reason"],
        differences=_differences(message),
    )


def _differences(message: _wire.Message) -> list[Difference]:
    return [Difference(**one) for one in message["differences"]]
