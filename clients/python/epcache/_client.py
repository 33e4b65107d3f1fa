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
from ._model import DIRECTORY_ENTRY, ModelSource, open_model
from ._request import EPSpec, Output, Runtime, providers

if TYPE_CHECKING:
    from ._events import Event, Subscription
    from ._explanation import Explanation
    from ._jobs import Failure, Job, Jobs
    from ._refusal import Decision

# Seconds.
HELLO_LIMIT = 0.05  # to connect; after that the application falls back to a plain session
REPORT_LIMIT = 5.0  # for a report; the daemon may verify the artefact
QUESTION_LIMIT = 10.0
MOST_PATIENCE = 10 * 365 * 86400.0  # replaces infinity, which deadline_ms cannot express


class Client:
    """Asks the daemon for compiled models. Safe for several threads, and after a fork.

    It connects with the first request. `socket` is a path; by default EPCACHE_SOCKET, else the
    user's own daemon, then the system's. `timeout` limits one acquire, `hello_limit` connecting to
    a daemon, and `restart_limit` the wait for a daemon that stopped during a request; all in
    seconds.
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
        self._connections = Connections(
            os.fspath(socket) if socket is not None else None, hello_limit, restart_limit
        )

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

        - `session_options` are session config entries. Entries that only affect how a session runs
          are ignored; session.model_external_initializers_file_folder_path names the directory of
          external data.
        - `dims` fixes free dimensions by name, `dims_by_denotation` by denotation.
        - `graph_optimization_level` of the compile: disable_all, basic, extended, layout, all; ""
          is the daemon's default.
        - `embed` puts the context into the graph instead of a file beside it. `output` has more
          options.
        - `route` is compile_api or session_options; "" is the daemon's default.
        - `runtime` is what the artefact will be loaded with, or its directory; by default the
          daemon's first runtime.
        - `on_miss` is wait, background, claim, fail, fetch, refresh, bypass, key_only or explain.
          background returns at once with the outcome "background" and the job. claim may return the
          right to compile (outcome "claim", see `claim`), or waits for another compile. refresh
          recompiles; bypass compiles without storing; fetch asks remotes; fetch, key_only and
          explain compile nothing.
        - `store` (shared, user, none) can narrow the scope of the result.
        - `strict_ort` accepts builds of the same ONNX Runtime version only.
        - `keep_going` finishes the compile even if all waiting requests have left.
        - `verify_output`, greater than 0, compares one run on zeros with the source model, and
          raises CompileFailed if a value differs by more, both absolutely and relatively.
        - `adopt` checks and stores a model that is already compiled; the outcome is "adopted". A
          model that is not a valid artefact for the request is passed through, and `warnings` has
          the reason.
        - `timeout` limits the whole call; by default the client's.
        - `progress` is called on this thread, at each new phase and once a second.
        - `external` opens external data: it gets the location and returns a descriptor, which is
          closed afterwards. By default locations are relative to the model's directory, for bytes
          to the working directory.
        - `group` has further models that are compiled together with this one, in this order, so
          that they share weights: `members` of the answer has their graphs.
        - `may_claim` permits a claim as the answer to on_miss="wait", if the daemon runs as another
          user and does not have the libraries. Otherwise the user's own daemon is started for them,
          if possible.

        Raises an epcache.Error: NoDaemon if none answers, DeadlineExceeded at the timeout,
        CompileFailed with the compiler's message, NotFound with on_miss="fail", BadModel and
        BadRequest for invalid input, Unavailable if the daemon has no such execution provider or
        device; OSError for a file that cannot be opened, and ValueError for an invalid argument.
        """
        requested = providers(eps)
        if named := [ep for ep in requested if ep.library]:
            raise ValueError(
                f"ExecutionProvider.library is for sessions; to name the library of "
                f"{named[0].name} here: runtime=Runtime(libraries=(Library({named[0].name!r}, "
                f"{named[0].library!r}),))"
            )
        if external is not None and group:
            raise ValueError("external= opens the files of one model, and group= names several")
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        entries = dict(session_options or {})
        directory = entries.pop(DIRECTORY_ENTRY, None)
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
            "holds_view": True,  # an Artefact stays open as long as a session made from it
            "verify_output": verify_output,
            "adopt": adopt,
        }
        if output is not None:
            request["output"] = output.message()
        with contextlib.ExitStack() as stack:
            where = (
                Runtime(directory=os.path.abspath(runtime)) if isinstance(runtime, str) else runtime
            )
            version = where.ort_version if where is not None else ""
            sources = [stack.enter_context(open_model(model, external, directory, version))]
            sources += [
                stack.enter_context(open_model(one, None, directory, version)) for one in group
            ]
            return Acquire(
                self._connections, sources, requested, where, request, deadline, progress, may_claim
            ).run()

    def explain(
        self, model: ModelSource, eps: EPSpec | Sequence[EPSpec], **request: Any
    ) -> Explanation:
        """Returns what the daemon would do for a request, and why; it compiles nothing. Takes the
        arguments of acquire.
        """
        if request.get("on_miss") not in (None, "wait", "explain"):
            raise ValueError(f"on_miss {request['on_miss']!r}: explain compiles nothing")
        with self.acquire(model, eps, **{**request, "on_miss": "explain"}) as artefact:
            if artefact.explanation is None:
                raise _errors.ProtocolError("the daemon sent no explanation")
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
        """Reports that ONNX Runtime refused an artefact, or a build by its key; returns the
        daemon's decision.

        `code` and `text` are those of ONNX Runtime's error; `runtime` has the libraries that tried
        to load it. Report an artefact before closing it, because the daemon checks these files.
        """
        from ._refusal import decision, sendable

        if isinstance(build, Artefact):
            graph, build = graph or build.graph, build.build
        message: _wire.Message = {
            "build": build,
            "code": code,
            "text": sendable(text),
            "graph": graph,
        }
        if runtime is not None:
            message["ort_version"] = runtime.ort_version
            message["runtime"] = runtime.described()
        return decision(self._ask("report", message, "report_reply", timeout))

    def events(
        self, since: float = 0.0, limit: int = 0, *, timeout: float = QUESTION_LIMIT
    ) -> list[Event]:
        """Returns the newest `limit` events since `since` (Unix time), oldest first: those of the
        machine and of this user's models. A `limit` of 0 is the daemon's limit.
        """
        from ._events import event

        message = {"since_ms": max(0, int(since * 1000)), "limit": limit}
        return [
            event(one) for one in self._ask("events", message, "events_reply", timeout)["events"]
        ]

    def jobs(self, *, timeout: float = QUESTION_LIMIT) -> Jobs:
        """Returns the queued and running compiles and the remembered failures that this user may
        see.
        """
        from ._jobs import jobs

        return jobs(self._ask("jobs", {}, "jobs_reply", timeout))

    def follow(
        self,
        job_id: str,
        *,
        timeout: float = math.inf,
        progress: Callable[[Progress], None] | None = None,
    ) -> Job:
        """Waits until a compile has ended and returns it; a failure is its `error`. `progress` is
        called on this thread. Raises NotFound for an unknown job.
        """
        from ._jobs import job

        deadline = time.monotonic() + min(timeout, MOST_PATIENCE)
        reply = Question(
            self._connections, "follow", {"job": job_id}, "jobs_reply", deadline, progress
        ).run()
        if len(reply["jobs"]) != 1:
            raise _errors.ProtocolError(f"the daemon returned {len(reply['jobs'])} jobs, not one")
        return job(reply["jobs"][0])

    def cancel(self, *job_ids: str, timeout: float = QUESTION_LIMIT) -> list[Job]:
        """Cancels compiles that this user requested, and returns them."""
        from ._jobs import jobs

        return jobs(self._ask("cancel_jobs", {"jobs": list(job_ids)}, "jobs_reply", timeout)).jobs

    def retry(self, *entries: str, timeout: float = QUESTION_LIMIT) -> list[Failure]:
        """Removes remembered failures, by build, request key, model digest or model name, and
        returns them.
        """
        from ._jobs import jobs

        return jobs(
            self._ask("retry_jobs", {"entries": list(entries)}, "jobs_reply", timeout)
        ).failures

    def subscribe(self, timeout: float = math.inf) -> Subscription:
        """Returns future events, for at most `timeout` seconds. Close it when done."""
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
        """Closes the idle connections. Artefacts stay valid, and the client can be used again."""
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
        raise ValueError(f"on_miss {name!r}: must be one of {known}") from None
