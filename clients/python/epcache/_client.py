"""The client: asks the daemon for compiled models."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import _errors, _wire
from ._acquire import Acquire
from ._artefact import Artefact, Progress
from ._call import Question
from ._connections import Connections
from ._messages import ENUMS
from ._model import FOLDER_ENTRY, ModelSource, open_model
from ._request import EPSpec, Output, Runtime, providers

if TYPE_CHECKING:
    from ._events import Event, Subscription
    from ._explanation import Explanation
    from ._jobs import Failure, Job, Jobs
    from ._refusal import Decision

HELLO_LIMIT = 0.05  # an application goes on without a daemon that does not answer by then
REPORT_LIMIT = 5.0  # the daemon may look into the artefact; an application has something better to do
QUESTION_LIMIT = 10.0
MOST_PATIENCE = 10 * 365 * 86400.0  # deadlines travel as milliseconds, which infinity is not


class Client:
    """Asks the daemon for compiled models. May be used by several threads at once, and after a fork.

    Nothing is connected before the first request. `socket` is a path; without one EPCACHE_SOCKET is asked, else
    the user's own daemon, then the system's. `timeout` is the limit for one acquire, in seconds. `hello_limit` is how
    long a daemon may take to answer at all. `restart_limit` is how long a daemon that went away during a request may
    take to come back.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        *,
        hello_limit: float = HELLO_LIMIT,
        restart_limit: float = 10.0,
    ) -> None:
        self._timeout = timeout
        self._connections = Connections(os.fspath(socket) if socket is not None else None, hello_limit, restart_limit)

    def acquire(
        self,
        model: ModelSource,
        eps: EPSpec | Sequence[EPSpec],
        *,
        session_options: Mapping[str, str] | None = None,
        dims: Mapping[str, int] | None = None,
        dims_by_denotation: Mapping[str, int] | None = None,
        graph_optimization_level: str = "",
        embed: bool = False,
        route: str = "",
        runtime: Runtime | str | None = None,
        on_miss: str = "wait",
        store: str = "",
        strict_ort: bool = False,
        keep_going: bool = False,
        verify_output: float = 0.0,
        adopt: bool = False,
        timeout: float | None = None,
        progress: Callable[[Progress], None] | None = None,
        external: Callable[[str], int] | None = None,
        output: Output | None = None,
        group: Sequence[ModelSource] = (),
        may_claim: bool = False,
    ) -> Artefact:
        """Returns the compiled form of a model, with a lease on it.

        - `model` is a path, an open binary file, or the model's bytes.
        - `eps` are execution providers in order of preference: "OpenVINOExecutionProvider:CPU", ("QNNExecutionProvider", {"soc_model": "60"})
          or ExecutionProvider.
        - `session_options` are session config entries. Those that only say how a session runs change nothing here;
          session.model_external_initializers_file_folder_path says where the model's external data is.
        - `dims` fixes free dimensions by name, `dims_by_denotation` by denotation.
        - `graph_optimization_level` to compile at: disable_all, basic, extended, layout, all; "" is the daemon's choice.
        - `embed` puts the context into the graph; else it is a file beside it. `output` says more of how it is to be written.
        - `route` is compile_api or session_options; "" is the daemon's choice.
        - `runtime` says what the artefact will be loaded with, or names its folder; without one it is the daemon's default runtime.
        - `on_miss` says what is done where it is not there: wait, background, claim, fail, refresh, bypass, key_only or explain.
          With background it is compiled while this answers at once, with the outcome "background" and the job. With claim the
          answer may be the right to compile it here: outcome "claim", and `claim` says how; or somebody else does already, and
          this waits. With refresh it is compiled anew though it is there; with bypass, key_only and explain nothing is compiled.
        - `store` (shared, user, none) can narrow where the result is kept.
        - `strict_ort` takes builds of the very version of ONNX Runtime only.
        - `keep_going` finishes a compile though nobody waits for it any more.
        - `verify_output`, greater than 0, has the compiled model run once on zeros beside the model; CompileFailed is raised where a
          value differs by more than that, both as it is and as a part of the model's.
        - `adopt` has a model that is compiled already kept: its files are checked, stored and served as those of any build, with the
          outcome "adopted", and "hit" from then on. What is no sound artefact for the request is passed through, and `warnings` says why.
        - `timeout` is for the whole call, in seconds; without one it is the client's.
        - `progress` is called on this thread, at each new phase and once a second.
        - `external` opens external data, which the daemon asks for by location: it gets the location and returns a descriptor, which is
          closed afterwards. Without it locations are meant from the model's folder on, those of bytes from the working directory.
        - `group` are further models that are compiled together with this one, after it and in this order, so that all share what is
          equal in them: `members` of the answer has their graphs.
        - `may_claim` says that the answer to on_miss="wait" may be a claim too, where the daemon runs as another user and does not have the
          libraries. Without it a daemon of the user's own is started for them, if there can be one.

        Raises an epcache.Error: NoDaemon when none answers, DeadlineExceeded at the timeout, CompileFailed with the compiler's own words,
        NotFound with on_miss="fail", BadModel and BadRequest for what makes no sense, Unavailable where the daemon has no such
        execution provider or device; OSError for a file that cannot be opened, and ValueError for an argument that is none of these.
        """
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        entries = dict(session_options or {})
        folder = entries.pop(FOLDER_ENTRY, None)
        request: _wire.Message = {
            "session_options": entries,
            "free_dimensions": dict(dims or {}),
            "free_dimensions_by_denotation": dict(dims_by_denotation or {}),
            "graph_optimization_level": graph_optimization_level,
            "embed": embed,
            "route": route,
            "on_miss": _on_miss(on_miss),
            "store": store,
            "strict_ort": strict_ort,
            "keep_going": keep_going,
            "holds_view": True,  # an Artefact is open for as long as anything made from it lives
            "verify_output": verify_output,
            "adopt": adopt,
        }
        if output is not None:
            request["output"] = output.message()
        with contextlib.ExitStack() as stack:
            where = Runtime(directory=os.path.abspath(runtime)) if isinstance(runtime, str) else runtime
            version = where.ort_version if where is not None else ""
            sources = [stack.enter_context(open_model(model, external, folder, version))]
            sources += [stack.enter_context(open_model(one, None, folder, version)) for one in group]
            return Acquire(self._connections, sources, providers(eps), where, request, deadline, progress, may_claim).run()

    def explain(self, model: ModelSource, eps: EPSpec | Sequence[EPSpec], **request: Any) -> Explanation:
        """Returns what the daemon would do for a request, and why; nothing is compiled. It takes what acquire takes."""
        with self.acquire(model, eps, **{**request, "on_miss": "explain"}) as artefact:
            if artefact.explanation is None:
                raise _errors.ProtocolError("the daemon gave no explanation")
            return artefact.explanation

    def report(
        self,
        build: Artefact | str,
        code: int,
        text: str,
        *,
        graph: str = "",
        runtime: Runtime | None = None,
        timeout: float = REPORT_LIMIT,
    ) -> Decision:
        """Tells the daemon that ONNX Runtime refused an artefact, or a build by its key, and returns what it decides.

        `code` and `text` are ONNX Runtime's; `runtime` is what it was loaded with. Report an artefact before it is
        closed: then the daemon can look at the very files.
        """
        from ._refusal import decision, sendable

        if isinstance(build, Artefact):
            graph, build = graph or build.graph, build.build
        message: _wire.Message = {"build": build, "code": code, "text": sendable(text), "graph": graph}
        if runtime is not None:
            message["ort_version"] = runtime.ort_version
            message["runtime"] = runtime.described()
        return decision(self._ask("report", message, "report_reply", timeout))

    def events(self, since: float = 0.0, limit: int = 0, *, timeout: float = QUESTION_LIMIT) -> list[Event]:
        """Returns what has happened since then (Unix time, seconds), oldest first, at most the newest `limit`.

        A limit of 0 is the daemon's choice. Only what concerns the machine and this user's own models is told.
        """
        from ._events import event

        message = {"since_ms": max(0, int(since * 1000)), "limit": limit}
        return [event(one) for one in self._ask("events", message, "events_reply", timeout)["events"]]

    def jobs(self, *, timeout: float = QUESTION_LIMIT) -> Jobs:
        """Returns the compiles that wait or run, and the failures that are remembered: those that this user may see."""
        from ._jobs import jobs

        return jobs(self._ask("jobs", {}, "jobs_reply", timeout))

    def follow(
        self, job_id: str, *, timeout: float = math.inf, progress: Callable[[Progress], None] | None = None
    ) -> Job:
        """Waits for the end of a compile and returns it as it ended; a failure is its `error`. `progress` is called on this thread.

        Raises NotFound for a job that is not known, or not any more.
        """
        from ._jobs import job

        deadline = time.monotonic() + min(timeout, MOST_PATIENCE)
        reply = Question(self._connections, "follow", {"job": job_id}, "jobs_reply", deadline, progress).run()
        if len(reply["jobs"]) != 1:
            raise _errors.ProtocolError(f"the daemon gave {len(reply['jobs'])} jobs for one")
        return job(reply["jobs"][0])

    def cancel(self, *job_ids: str, timeout: float = QUESTION_LIMIT) -> list[Job]:
        """Ends compiles that this user asked for, and returns them."""
        from ._jobs import jobs

        return jobs(self._ask("cancel_jobs", {"jobs": list(job_ids)}, "jobs_reply", timeout)).jobs

    def retry(self, *entries: str, timeout: float = QUESTION_LIMIT) -> list[Failure]:
        """Has the daemon forget failures, by build, request key, model digest or model name, and returns them."""
        from ._jobs import jobs

        return jobs(self._ask("retry_jobs", {"entries": list(entries)}, "jobs_reply", timeout)).failures

    def subscribe(self, timeout: float = math.inf) -> Subscription:
        """Returns events as they happen from now on, for at most `timeout` seconds. Close it when done."""
        from ._events import Subscription

        until = time.monotonic() + timeout
        connection = self._connections.connect(until)
        try:
            return Subscription(connection, until)
        except BaseException:
            connection.close()
            raise

    def _ask(self, body: str, message: _wire.Message, reply: str, timeout: float) -> _wire.Message:
        return Question(self._connections, body, message, reply, time.monotonic() + timeout).run()

    def close(self) -> None:
        """Closes the idle connections. Artefacts stay good, and the client can be used again."""
        self._connections.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()




def _on_miss(name: str) -> int:
    try:
        return ENUMS["OnMiss"][name.upper()]
    except KeyError:
        known = ", ".join(choice.lower() for choice in ENUMS["OnMiss"])
        raise ValueError(f"on_miss {name!r}: it is one of {known}") from None
