"""The report of a session: where it came from, and the attempts before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from . import _errors
from ._artefact import SERVED, Artefact
from ._client import QUESTION_LIMIT, Client
from ._fields import dataclass, field
from ._refusal import Decision


@dataclass(frozen=True)
class Pending:
    """A background compile for a session that did not wait."""

    client: Client
    job: str
    acquire: Callable[..., Artefact]  # repeats the request, with timeout= and on_miss=

    def is_stored(self) -> bool:
        try:
            self.acquire(on_miss="fail", timeout=QUESTION_LIMIT).close()
        except (_errors.Error, OSError):
            return False
        return True

    def wait(self, until: float) -> None:
        """Returns at the end of the job, or at that time of time.monotonic()."""
        try:
            self.client.follow(self.job, timeout=until - time.monotonic())
        except _errors.Error:
            # the job or the daemon has ended: is_stored() looks the build up
            pass


@dataclass
class Report:
    """Where a session came from.

    `outcome` is "hit", "compiled", "waited", "put" (compiled here and stored) or "adopted" (an
    already compiled model, now stored) for a session from the cache. It is "passthrough" (an
    already compiled model, not stored), "background" (the daemon compiles, see `ready`), "bypassed"
    (the cache was not asked), "no daemon" or "failed" for a plain session on the same execution
    provider, or with "background" on `meanwhile`. `why` is the reason, in words.

    `compatibility` is how well the artefact fits this process's libraries: "optimal",
    "prefer_recompilation" (it works, and the daemon recompiles it) or "unknown". `decisions` has
    the daemon's decision on each artefact that ONNX Runtime refused.
    """

    outcome: str
    why: str = ""
    compatibility: str = ""
    # the source of that: "same library", "execution provider", "fingerprint", ...
    compatibility_source: str = ""
    compatibility_reason: str = ""  # in words
    request_key: str = ""  # 64 hex digits; "" if the daemon was not asked
    build: str = ""  # build key, 64 hex digits, for epcachectl show; "" for a plain session
    model_digest: str = ""  # BLAKE3 over graph and external data, 64 hex digits
    compile_seconds: float = 0.0  # duration of the compile, now or earlier
    acquire_seconds: float = 0.0  # duration of all requests to the daemon, including a compile
    load_seconds: float = 0.0  # duration of the load by ONNX Runtime
    path: str = ""  # of the graph that ONNX Runtime loaded; "" for bytes
    warnings: list[str] = field(default_factory=list)  # about the build or the request
    decisions: list[Decision] = field(default_factory=list)
    job: str = ""  # of "background": the compile, for Client.follow and epcachectl jobs
    _pending: Pending | None = field(default=None, repr=False, compare=False)

    @property
    def cached(self) -> bool:
        """Whether the session came from the cache."""
        return self.outcome in SERVED

    @property
    def ready(self) -> bool:
        """Whether a new session would be from the cache. With "background" this asks the daemon."""
        return self.cached if self._pending is None else self._pending.is_stored()

    def wait(self, timeout: float = math.inf) -> bool:
        """Waits until the background compile has ended, and returns `ready`."""
        if self._pending is not None:
            self._pending.wait(time.monotonic() + timeout)
        return self.ready


@dataclass
class Attempts:
    """The attempts to make a session from the cache, and their results."""

    outcome: str = "failed"
    seconds: float = 0.0  # duration of requests and reports
    reasons: list[str] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def fallback_report(self) -> Report:
        """Returns the report of a session that falls back to the source model."""
        return Report(
            self.outcome,
            "; ".join(self.reasons),
            acquire_seconds=self.seconds,
            decisions=self.decisions,
            warnings=self.warnings,
        )

    def report(self, artefact: Artefact) -> Report:
        """Returns the report of a session made from this artefact."""
        return Report(
            outcome=artefact.outcome,
            why="; ".join([artefact.why, *self.reasons]),
            compatibility=artefact.compatibility,
            compatibility_source=artefact.compatibility_source,
            compatibility_reason=artefact.compatibility_reason,
            request_key=artefact.request_key,
            build=artefact.build,
            model_digest=artefact.model_digest,
            compile_seconds=artefact.compile_seconds,
            acquire_seconds=self.seconds,
            decisions=self.decisions,
            warnings=list(artefact.warnings),
            job=artefact.job,
        )
