"""The result of an acquire: the artefact with its lease, and the progress until then."""

from __future__ import annotations

import _thread
import contextlib
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import _errors, _wire
from ._fields import dataclass, field

if TYPE_CHECKING:
    import mmap

    from ._claim import Claim
    from ._explanation import Explanation


@dataclass(frozen=True)
class Progress:
    """The progress of a request. `phase` is one of reading, queued, probing, converting, compiling,
    checking, storing, verifying, comparing.
    """

    phase: str
    elapsed_seconds: float  # since the daemon got the request
    detail: str = ""  # of the phase, such as the compiler's own phase; may be empty
    done_bytes: int = 0  # of a phase that reads or writes
    total_bytes: int = 0  # 0: not known
    # for the whole request, from earlier compiles of similar size; 0: not known
    estimate_seconds: float = 0.0
    job: str = ""  # id of the compile that the request waits for
    waiting: int = 0  # requests that wait for it


@dataclass(frozen=True)
class File:
    """A file of an artefact."""

    name: str  # relative to the view
    size: int  # bytes
    digest: str  # BLAKE3, 64 hex digits


@dataclass(frozen=True)
class Member:
    """One model of a weight-sharing group."""

    name: str  # of the source model
    model_digest: str  # 64 hex digits
    graph: str  # relative to the view
    # in addition to the artefact's, if several members are loaded in one process
    session_options: dict[str, str]


@dataclass
class Artefact:
    """A compiled model, and the lease on it.

    While it is open, the daemon neither changes nor removes its files: keep it open as long as a
    session made from it exists. Load `path` (or `view_path`) with exactly these provider and
    session options.
    """

    # with a view: "hit", "compiled", "waited", "put", "adopted"; without: "passthrough",
    # "background", "claim", "key", "explanation"
    outcome: str
    request_key: str  # of model, options and devices, but not of libraries; 64 hex digits
    build: str  # build key, 64 hex digits; "" without a build
    model_digest: str  # BLAKE3 over graph and external data, 64 hex digits
    ep: str  # name of the first execution provider
    sdk_version: str  # of the vendor's SDK that compiled it; "" if not known
    # that it was compiled for; if the EP states none, the class of the machine
    hardware_architecture: str
    compatibility: str  # "optimal", "prefer_recompilation", "unsupported", "unknown"
    # the source of that: "same library", "execution provider", "fingerprint", ...
    compatibility_source: str
    compatibility_reason: str  # in words
    why: str  # why it was a hit, or why it was compiled, in words
    view: str  # absolute path of the view's directory; "" without one
    graph: str  # relative to the view
    files: list[File]  # all, including the graph
    provider_options: dict[str, dict[str, str]]  # by execution provider
    session_options: dict[str, str]  # session config entries
    graph_optimization_level: str  # "" if any level works
    compile_seconds: float  # duration of the compile, now or earlier
    elapsed_seconds: float  # in the daemon
    record: str  # the request as the daemon understood it, JSON
    runtime: str  # directory or library of the daemon's runtime that was requested or compiled it
    warnings: list[str]  # about the build
    job: str = ""  # of "background": the compile, for Client.follow
    # of a group: all members, in the order in which one process has to load them
    members: list[Member] = field(default_factory=list)
    member: int = 0  # index of the requested one; `graph` is its graph
    fd: int | None = None  # descriptor of the view's directory; None without a view, or when closed
    # from the first byte of the last request frame to the last byte of its answer
    round_trip_seconds: float = 0.0
    connect_seconds: float = 0.0  # duration of connecting; 0 if a connection was reused
    server: str = ""  # the daemon's name and version
    explanation: Explanation | None = None  # for on_miss="explain"
    claim: Claim | None = None  # of "claim": compile with these options, and put the result
    # the daemon's message about the claim
    claimed: _wire.Message | None = field(default=None, repr=False, compare=False)
    _lock: _thread.LockType = field(
        default_factory=_thread.allocate_lock, repr=False, compare=False
    )

    @property
    def path(self) -> str:
        """The graph's path through the descriptor, valid while this is open. It needs no access to
        the daemon's directories, and never leads to another model. Raises ValueError without `fd`.
        """
        if self.fd is None:
            raise ValueError(f"this artefact is closed, or has no view (outcome {self.outcome!r})")
        return f"/proc/self/fd/{self.fd}/{self.graph}"

    @property
    def view_path(self) -> str:
        """The graph's path by name, for loaders that cannot use a descriptor. Some users may not
        have access to it. "" without a view.
        """
        return os.path.join(self.view, self.graph) if self.view else ""

    def load_options(self) -> dict[str, str]:
        """Returns the session config entries to load it with: `session_options`, and for a
        weightless artefact the path of its source model.
        """
        options = dict(self.session_options)
        directory = os.path.dirname(self.graph)
        sources = [
            f.name
            for f in self.files
            if os.path.dirname(f.name) == directory
            and f.name.endswith(".onnx")
            and f.name != self.graph
        ]
        weightless = (
            options.get("ep.enable_weightless", "0") != "0"
            or options.get("ep.enable_weightless_mode", "0") != "0"
        )
        if weightless and sources:
            options["ep.context_source_model_path"] = os.path.join(
                os.path.dirname(self.path), os.path.basename(sources[0])
            )
        return options

    def bytes_options(self) -> dict[str, str]:
        """Returns further session config entries for loading the graph from its bytes: the location
        of the files beside it.

        ONNX Runtime reads initializers in files only if it has access to their real path. Otherwise
        pass the files by SessionOptions.add_external_initializers_from_files_in_memory, as
        InferenceSession does.
        """
        return {
            "ep.context_file_path": self.path,
            "session.model_external_initializers_file_folder_path": os.path.dirname(self.path),
        }

    @contextlib.contextmanager
    def mapped_files(self) -> Iterator[dict[str, mmap.mmap]]:
        """Maps the files beside the graph, by their relative names, while the context manager is
        open.
        """
        import mmap

        directory = os.path.dirname(self.graph) + "/"
        with contextlib.ExitStack() as stack:
            mapped = {}
            for f in self.files:
                if (
                    f.name == self.graph
                    or f.size == 0
                    or not f.name.startswith(directory)
                    or not is_clean(f.name)
                ):
                    continue
                with open(f"/proc/self/fd/{self.fd}/{f.name}", "rb") as opened:
                    mapped[f.name.removeprefix(directory)] = stack.enter_context(
                        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
                    )
            yield mapped

    def close(self) -> None:
        """Releases the lease, and the claim if there is one. May be called again."""
        if self.claim is not None:
            self.claim.close()
        self._release()

    def _release(self) -> None:
        with self._lock:
            descriptor, self.fd = self.fd, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Artefact:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            self._release()  # and not the claim, which the caller may still use
        except Exception:  # at interpreter exit, modules may be unloaded already
            pass


def progress(message: _wire.Message) -> Progress:
    return Progress(
        phase=message["phase"],
        elapsed_seconds=message["elapsed_ms"] / 1000,
        detail=message["detail"],
        done_bytes=message["done_bytes"],
        total_bytes=message["total_bytes"],
        estimate_seconds=message["estimate_ms"] / 1000,
        job=message["job"],
        waiting=message["waiting"],
    )


def is_clean(path: str) -> bool:
    """Whether a relative path has no empty, "." or ".." parts, so that it cannot leave the view."""
    parts = path.split("/")
    return "\0" not in path and all(part not in ("", ".", "..") for part in parts)


def artefact(reply: _wire.Message, received: list[int]) -> Artefact:
    """Returns the artefact of a reply. It owns its descriptor, which is removed from `received`."""
    if "fd" in reply and reply["fd"] >= len(received):
        raise _errors.ProtocolError(
            f"the view is descriptor {reply['fd']}, but only {len(received)} were received"
        )
    if reply["outcome"] in SERVED and not reply["view"] and "fd" not in reply:
        raise _errors.ProtocolError(f"the daemon answered {reply['outcome']!r} without a view")
    if (reply["view"] or "fd" in reply) and not is_clean(reply["graph"]):
        raise _errors.ProtocolError(f"the graph {reply['graph']!r} is outside the view")
    members = [Member(**one) for one in reply["members"]]
    if any(not is_clean(one.graph) for one in members) or reply["member"] >= max(1, len(members)):
        raise _errors.ProtocolError(
            "the answer has an invalid group: a graph outside the view, or none for this model"
        )
    fd = None
    if "fd" in reply:
        if not stat.S_ISDIR(os.fstat(received[reply["fd"]]).st_mode):
            raise _errors.ProtocolError("the descriptor of the view is not a directory")
        fd = received.pop(reply["fd"])
    explained = None
    if "explanation" in reply:
        from ._explanation import explanation

        explained = explanation(reply["explanation"])
    return Artefact(
        **{name: reply[name] for name in _PLAIN},
        files=[File(**f) for f in reply["files"]],
        provider_options={
            ep: options["entries"] for ep, options in reply["provider_options"].items()
        },
        explanation=explained,
        claimed=reply.get("claim"),
        members=members,
        member=reply["member"],
        fd=fd,
    )


SERVED = ("hit", "compiled", "waited", "put", "adopted")  # outcomes with a view

# Fields that are copied from the reply without a change.
_PLAIN = (
    "outcome request_key build model_digest ep sdk_version hardware_architecture compatibility "
    "compatibility_source compatibility_reason why view graph session_options "
    "graph_optimization_level compile_seconds elapsed_seconds record runtime warnings job"
).split()
