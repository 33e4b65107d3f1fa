"""Where a session came from, and what was tried before."""

from __future__ import annotations

from dataclasses import dataclass, field

from ._artefact import Artefact
from ._refusal import Decision


@dataclass
class Report:
    """Where a session came from.

    `outcome` is the daemon's "hit", "compiled" or "waited" for a session from the cache; "passthrough" for a model
    that was compiled already; "bypassed" for one that the cache was not asked for; "no daemon"; or "failed". In the last
    four cases it is a plain session on the same execution provider. `why` says more, for people.

    `compatibility` is how good the artefact is for this process's libraries: "optimal", "prefer_recompilation" (it works,
    and the daemon makes a better one) or "unknown". `decisions` holds what the daemon said to each artefact that ONNX
    Runtime refused.
    """

    outcome: str
    why: str = ""
    compatibility: str = ""
    compatibility_source: str = ""  # who says so: "same library", "execution provider", "fingerprint", ...
    compatibility_reason: str = ""
    request_key: str = ""
    build: str = ""
    model_digest: str = ""
    compile_seconds: float = 0.0  # what the compile took, now or earlier
    acquire_seconds: float = 0.0  # asking the daemon, compile included
    load_seconds: float = 0.0  # ONNX Runtime's part
    path: str = ""  # what ONNX Runtime loaded
    warnings: list[str] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def cached(self) -> bool:
        """Whether the session was made from the cache."""
        return self.outcome in ("hit", "compiled", "waited")


@dataclass
class Attempts:
    """What was tried for a session, and what came of it."""

    outcome: str = "failed"
    seconds: float = 0.0  # of asking the daemon, and of telling it
    said: list[str] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def without(self) -> Report:
        """The report of a session that is made from the source model after all."""
        return Report(
            self.outcome,
            "; ".join(self.said),
            acquire_seconds=self.seconds,
            decisions=self.decisions,
            warnings=self.warnings,
        )

    def with_(self, artefact: Artefact) -> Report:
        """The report of a session that is made from this artefact."""
        return Report(
            outcome=artefact.outcome,
            why="; ".join([artefact.why, *self.said]),
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
        )
