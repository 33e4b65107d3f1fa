"""What an acquire gives: the artefact, the lease on it, and how far the daemon is meanwhile."""

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
    elapsed_seconds: float  # since the request came
    detail: str = ""  # more of the phase, such as the compiler's own; may be empty
    done_bytes: int = 0  # of a phase that reads or writes
    total_bytes: int = 0  # 0: not known
    # of the whole request, from earlier compiles of like size; 0: not known
    estimate_seconds: float = 0.0
    job: str = ""  # of the compile that the request waits for
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
    # besides the artefact's, when several members are loaded in one process
    session_options: dict[str, str]


@dataclass
class Artefact:
    """A compiled model, and the lease on it.

    While it is open the daemon keeps the files as they are: keep it open as long as a session made
    from it lives. Load `path` (or `view_path`) with exactly these provider and session options.
    """

    # "hit", "compiled", "waited", "put", "adopted"; "passthrough", "background", "claim", "key",
    # "explanation": without a view
    outcome: str
    request_key: str  # 64 hex digits: model, options and devices, and not the libraries
    build: str  # build key, 64 hex digits; "" where none was made
    model_digest: str  # BLAKE3 over graph and external data, 64 hex digits
    ep: str  # name of the first execution provider
    sdk_version: str  # of the vendor's SDK that made it; "" where it says none
    # that it was made for; where the EP states none, the class of the machine
    hardware_architecture: str
    compatibility: str  # "optimal", "prefer_recompilation", "unsupported", "unknown"
    # the source of that: "same library", "execution provider", "fingerprint", ...
    compatibility_source: str
    compatibility_reason: str  # in words
    why: str  # why it was a hit, or why it was compiled, in words
    view: str  # absolute path of the view's directory; "" without one
    graph: str  # relative to the view
    files: list[File]  # all, the graph too
    provider_options: dict[str, dict[str, str]]  # by execution provider
    session_options: dict[str, str]  # session config entries
    graph_optimization_level: str  # "" where it does not matter
    compile_seconds: float  # what the compile took, now or earlier
    elapsed_seconds: float  # in the daemon
    record: str  # the request as the daemon understood it, JSON
    runtime: str  # directory or library of the daemon's runtime that was asked for, or made it
    warnings: list[str]  # about the build
    job: str = ""  # of "background": the compile, for Client.follow
    # of a group: all, in the order in which to load several in one process
    members: list[Member] = field(default_factory=list)
    member: int = 0  # the one that was requested; `graph` is its graph
    fd: int | None = None  # descriptor of the view's directory; None without a view, or when closed
    # from the first byte of the last request frame to the last of its answer
    round_trip_seconds: float = 0.0
    connect_seconds: float = 0.0  # of the connection that was used, when it was made
    server: str = ""  # the daemon's name and version
    explanation: Explanation | None = None  # for on_miss="explain"
    claim: Claim | None = None  # of "claim": compile with these options, and put the result
    # what the claim is made of
    claimed: _wire.Message | None = field(default=None, repr=False, compare=False)
    _lock: _thread.LockType = field(
        default_factory=_thread.allocate_lock, repr=False, compare=False
    )

    @property
    def path(self) -> str:
        """The graph's path through the descriptor, valid while this is open. It needs no rights on
        the daemon's directories, and is never used for another model.
        """
        if self.fd is None:
            raise ValueError("this artefact is closed, or was answered without a view")
        return f"/proc/self/fd/{self.fd}/{self.graph}"

    @property
    def view_path(self) -> str:
        """The graph's path by name, for loaders that cannot use a descriptor. Not every user can
        reach it.
        """
        return os.path.join(self.view, self.graph) if self.view else ""

    def load_options(self) -> dict[str, str]:
        """Returns the session config entries to load it with: `session_options`, and the source of
        a weightless one.
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
        """Returns further session config entries for loading the graph from its bytes: where the
        files beside it are.

        ONNX Runtime reads initializers in files only if it can walk their real path. Otherwise pass
        the files by SessionOptions.add_external_initializers_from_files_in_memory, as
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
                    or not clean(f.name)
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
            self._release()  # a claim may be in other hands
        except Exception:  # the interpreter may be half gone: the modules that this uses, too
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


def clean(path: str) -> bool:
    """Whether a relative path stays below where it starts."""
    parts = path.split("/")
    return "\0" not in path and all(part not in ("", ".", "..") for part in parts)


def artefact(reply: _wire.Message, received: list[int]) -> Artefact:
    """Turns a reply into an artefact, which takes its descriptor out of `received`; the others stay
    there.
    """
    if "fd" in reply and reply["fd"] >= len(received):
        raise _errors.ProtocolError(f"the view is descriptor {reply['fd']} of {len(received)}")
    if reply["outcome"] in SERVED and not reply["view"] and "fd" not in reply:
        raise _errors.ProtocolError(f"the answer says {reply['outcome']!r}, and has no view")
    if (reply["view"] or "fd" in reply) and not clean(reply["graph"]):
        raise _errors.ProtocolError(f"the graph {reply['graph']!r} is outside the view")
    members = [Member(**one) for one in reply["members"]]
    if any(not clean(one.graph) for one in members) or reply["member"] >= max(1, len(members)):
        raise _errors.ProtocolError(
            "a graph of the group is outside the view, or the group does not have the model"
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


SERVED = ("hit", "compiled", "waited", "put", "adopted")  # outcomes that come with a build

# Fields that an Artefact takes from the reply as they are.
_PLAIN = (
    "outcome request_key build model_digest ep sdk_version hardware_architecture compatibility "
    "compatibility_source compatibility_reason why view graph session_options "
    "graph_optimization_level compile_seconds elapsed_seconds record runtime warnings job"
).split()
