"""Jobs: queued and running compiles, and remembered failures (the negative cache)."""

from __future__ import annotations

from . import _errors, _wire
from ._fields import dataclass


@dataclass(frozen=True)
class Job:
    """A compile. Times are Unix time, 0 if they do not apply."""

    id: str  # for Client.follow and Client.cancel
    state: str  # "queued", "running", "claimed"; after its end "done", "failed", "cancelled"
    phase: str  # as in Progress; "" before it runs
    model_name: str  # as requested
    model_digest: str  # 64 hex digits
    request_key: str  # 64 hex digits
    build: str  # build key, 64 hex digits
    ep: str  # name of the first execution provider
    uid: int  # the first user who requested it
    background: bool  # whether it was started without a request that waits
    waiting: int  # number of requests that wait for it
    queued: float  # Unix time
    started: float  # Unix time; 0: not yet
    elapsed_seconds: float  # since it was queued
    estimate_seconds: float  # from queued to done; 0: not known
    why: str  # why it is compiled
    models: int  # number of models of a group; else 0
    error: _errors.Error | None  # of "failed"


@dataclass(frozen=True)
class Failure:
    """A failed compile. Requests for it are answered from memory until `retry`, Unix time."""

    request_key: str  # 64 hex digits
    build: str  # build key, 64 hex digits
    model_name: str  # as first requested
    model_digest: str  # 64 hex digits
    ep: str  # name of the first execution provider
    # "crash", "timeout", "memory", "refused", "no node taken", "invalid output", "load check
    # failed", ...
    reason: str
    text: str  # includes the end of the compiler's output
    facts: dict[str, str]  # "signal", "code", "exit", ...
    count: int  # failures in a row
    first: float  # Unix time of the first failure
    last: float  # Unix time of the last failure
    retry: float
    scope: str  # "shared", or the user for whom it is remembered


@dataclass(frozen=True)
class Jobs:
    """The queued and running compiles, in order, and the failures, newest first."""

    jobs: list[Job]  # those that this user may see
    failures: list[Failure]  # those that this user may see


def job(message: _wire.Message) -> Job:
    fields = dict(message)
    error = fields.pop("error", None)
    return Job(
        queued=fields.pop("queued_ms") / 1000,
        started=fields.pop("started_ms") / 1000,
        elapsed_seconds=fields.pop("elapsed_ms") / 1000,
        estimate_seconds=fields.pop("estimate_ms") / 1000,
        error=None
        if error is None
        else _errors.from_wire(error["class"], error["text"], error["hint"], error["facts"]),
        **fields,
    )


def failure(message: _wire.Message) -> Failure:
    fields = dict(message)
    return Failure(
        first=fields.pop("first_ms") / 1000,
        last=fields.pop("last_ms") / 1000,
        retry=fields.pop("retry_ms") / 1000,
        **fields,
    )


def jobs(reply: _wire.Message) -> Jobs:
    return Jobs([job(one) for one in reply["jobs"]], [failure(one) for one in reply["failures"]])
