"""epcache: compiled ONNX Runtime models from the machine's cache.

Compiling a model for an NPU, GPU or CPU execution provider takes seconds to minutes. The daemon
epcached caches the result; this package requests it, and loads it with the application's own ONNX
Runtime:

    import epcache
    options = epcache.SessionOptions()          # ONNX Runtime's class, which records what is set
    session = epcache.InferenceSession("model.onnx", options, ep="OpenVINOExecutionProvider:CPU")
    session.epcache.outcome                     # "hit", "compiled", ..., "no daemon"

Without a daemon, or after any failure of it, the session is a plain one on the same execution
provider, with one EpcacheWarning. It does not fall back to the CPU by itself; a list `providers=`
without a plugin does, because ONNX Runtime gets it unchanged. An artefact that ONNX Runtime refuses
is reported, and requested again once.

Models that share weights are compiled as one group and loaded in one process:

    with epcache.SessionGroup(["prefill.onnx", "decode.onnx"], options,
                              ep="QNNExecutionProvider:NPU") as (prefill, decode):
        ...

`why` explains what the daemon would do for a session, `warm` compiles models before they are
needed, and `compile` writes a compiled model into a directory. `Client` returns artefacts, reports,
explanations and events. It does not import ONNX Runtime, which only the session classes and these
functions do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from ._artefact import Artefact, File, Member, Progress
    from ._claim import Claim
    from ._client import Client
    from ._connections import default_sockets
    from ._compiled_copy import Compiled
    from ._errors import (
        BadModel,
        BadRequest,
        Busy,
        Cancelled,
        CompileFailed,
        DeadlineExceeded,
        EpcacheWarning,
        Error,
        Internal,
        NoDaemon,
        NoSpace,
        NotAllowed,
        NotFound,
        ProtocolError,
        Stale,
        Unavailable,
        VersionMismatch,
    )
    from ._events import Event, Subscription
    from ._explanation import Candidate, Difference, Explanation, Neighbour
    from ._functions import Warmed, compile, warm, why
    from ._jobs import Failure, Job, Jobs
    from ._refusal import Decision
    from ._report import Report
    from ._request import Device, ExecutionProvider, Library, Output, Runtime
    from ._session import InferenceSession
    from ._session_group import SessionGroup
    from ._session_options import SessionOptions

# The modules that define the public names. They are imported at first use, so that `import epcache`
# is cheap.
_FROM = {
    "_artefact": "Artefact File Member Progress",
    "_claim": "Claim",
    "_client": "Client",
    "_connections": "default_sockets",
    "_compiled_copy": "Compiled",
    "_errors": "BadModel BadRequest Busy Cancelled CompileFailed DeadlineExceeded EpcacheWarning "
    "Error Internal NoDaemon NoSpace NotAllowed NotFound ProtocolError Stale Unavailable "
    "VersionMismatch",
    "_events": "Event Subscription",
    "_explanation": "Candidate Difference Explanation Neighbour",
    "_functions": "Warmed compile warm why",
    "_jobs": "Failure Job Jobs",
    "_refusal": "Decision",
    "_report": "Report",
    "_request": "Device ExecutionProvider Library Output Runtime",
    "_session": "InferenceSession",
    "_session_group": "SessionGroup",
    "_session_options": "SessionOptions",
}
_MODULES = {name: module for module, names in _FROM.items() for name in names.split()}

__all__ = [
    "Artefact",
    "BadModel",
    "BadRequest",
    "Busy",
    "Cancelled",
    "Candidate",
    "Claim",
    "Client",
    "CompileFailed",
    "Compiled",
    "DeadlineExceeded",
    "Decision",
    "Device",
    "Difference",
    "EpcacheWarning",
    "Error",
    "Event",
    "ExecutionProvider",
    "Explanation",
    "Failure",
    "File",
    "InferenceSession",
    "Internal",
    "Job",
    "Jobs",
    "Library",
    "Member",
    "Neighbour",
    "NoDaemon",
    "NoSpace",
    "NotAllowed",
    "NotFound",
    "Output",
    "Progress",
    "ProtocolError",
    "Report",
    "Runtime",
    "SessionOptions",
    "SessionGroup",
    "Stale",
    "Subscription",
    "Unavailable",
    "VersionMismatch",
    "Warmed",
    "__version__",
    "compile",
    "default_sockets",
    "warm",
    "why",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
