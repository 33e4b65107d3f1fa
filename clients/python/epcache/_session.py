"""InferenceSession: ONNX Runtime's own, made from the cache, with a fallback to a plain session."""

from __future__ import annotations

import _thread
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _errors, _plugins
from ._artefact import Artefact
from ._client import Client
from ._model import DIRECTORY_ENTRY
from ._onnxruntime import ort
from ._record import LEVELS_BY_NAME, Record
from ._refusal import Refusal, refusal_of
from ._report import Attempts, Pending, Report
from ._request import EPSpec, Output
from ._progress_display import Progressing, model_name, displayed
from ._session_request import Source, SessionRequest, session_request

# How long a session waits for a daemon that went away during its request: longer than a restart,
# shorter than a compile in this process is worth.
RESTART_LIMIT = 2.0

_PASSED_ON = frozenset(("read_config_from_model", "disabled_optimizers", "enable_fallback"))


_default_client: Client | None = None
_default_lock = _thread.allocate_lock()


def shared_client() -> Client:
    """One client for all sessions: it keeps its connection."""
    global _default_client
    with _default_lock:
        if _default_client is None:
            _default_client = Client(restart_limit=RESTART_LIMIT)
        return _default_client


class InferenceSession(ort.InferenceSession):  # type: ignore[misc]
    """ONNX Runtime's InferenceSession on the execution providers `ep`, from the cache if possible.

    `ep` may be omitted if `sess_options` names devices, or `providers` is given as for ONNX
    Runtime. Only an epcache.SessionOptions uses the cache; another one makes a plain session.
    `client` is the daemon to ask: by default the one that is found, with False none. `on_miss`
    (wait, background, claim, fail, fetch, refresh or bypass), `embed`, `output`, `store`,
    `keep_going`, `adopt` and `timeout` are those of Client.acquire. Other arguments are ONNX
    Runtime's (`read_config_from_model`, `disabled_optimizers`, `enable_fallback`).

    on_miss="background" makes a plain session while the daemon compiles; `session.epcache.ready`
    reports when a new session would come from the cache. `meanwhile` names one of ONNX Runtime's
    own execution providers for the plain session, such as "CPUExecutionProvider"; without it the
    plain session is on `ep`, and compiles as well.

    on_miss="claim" compiles with this process's own libraries and stores the result: in epcached's
    worker as a child process, or in this process if there is no worker or the execution provider is
    part of ONNX Runtime. Other requests for the model wait. "wait" does the same if the daemon runs
    as another user and has no equal libraries.

    Raises ONNX Runtime's errors; Unavailable if the execution provider or its device is missing;
    and CompileFailed if the model crashed the execution provider in the daemon's worker, because it
    would crash this process too.
    """

    def __init__(
        self,
        path_or_bytes: Source,
        sess_options: ort.SessionOptions | None = None,
        providers: Sequence[str | tuple[str, Mapping[Any, Any]]] | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
        *,
        ep: EPSpec | Sequence[EPSpec] | None = None,
        client: Client | bool | None = None,
        on_miss: str = "wait",
        embed: bool = False,
        output: Output | None = None,
        store: str = "",
        keep_going: bool = False,
        adopt: bool = False,
        meanwhile: str = "",
        timeout: float | None = None,
        progress: Progressing = None,
        **kwargs: Any,
    ) -> None:
        if unknown := set(kwargs) - _PASSED_ON:
            raise TypeError(f"InferenceSession does not take {', '.join(sorted(unknown))}")
        if meanwhile and (
            on_miss != "background" or meanwhile not in ort.get_available_providers()
        ):
            raise ValueError(
                f"meanwhile={meanwhile!r}: it needs on_miss='background' and an execution "
                "provider built into ONNX Runtime"
            )
        if output is not None and on_miss == "claim":
            raise ValueError("output= cannot be used with on_miss='claim'")
        falls_back = bool(kwargs.pop("enable_fallback", False))
        self._meanwhile = meanwhile
        self._begin(
            session_request(path_or_bytes, sess_options, ep, providers, provider_options, **kwargs)
        )
        reason = (
            "the application disabled the cache"
            if client is False
            else self._wanted.why_not(on_miss)
        )
        if reason:
            self._report = Report("bypassed", reason)
            self._load_plain()
        else:
            asked = client if isinstance(client, Client) else shared_client()
            wishes = {"on_miss": on_miss, "embed": embed, "output": output, "store": store}
            wishes |= {"keep_going": keep_going, "adopt": adopt, "may_claim": output is None}
            with displayed(progress, model_name(path_or_bytes)) as step:
                self._load_cached(asked, timeout=timeout, progress=step, **wishes)
        if not (self._report.outcome == "background" and meanwhile):
            self._check_providers()
        self._report.warnings[:0] = self._wanted.missing
        # while it runs, as the application wishes; what it is made of has been seen to
        if falls_back:
            self.enable_fallback()
        if text := self._warning(client):
            warnings.warn(text, _errors.EpcacheWarning, stacklevel=2)

    def _begin(self, wanted: SessionRequest) -> None:
        """Takes up what is wanted; the session itself comes with _load."""
        self._wanted = wanted
        self._report = Report("failed")

    def _warning(self, client: Client | bool | None) -> str:
        """Returns what the application is to be warned of, all of it in one."""
        said = list(self._wanted.missing)
        if self._report.outcome in ("bypassed", "no daemon", "failed") and client is not False:
            why = self._report.why.removeprefix(self._report.outcome + ": ")
            said.insert(0, f"{self._report.outcome}: {why}; the model is compiled in this process")
        return "; ".join(said)

    @property
    def epcache(self) -> Report:
        """Where this session came from, and how long that took."""
        return self._report

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """As in ONNX Runtime: makes a plain session of the source model."""
        if self._report.cached:
            self._report = Report("bypassed", "set_providers was called")
            record = self._wanted.record or Record()
            self._sess_options_initial = record.replay(only_running=False)
        super().set_providers(providers, provider_options)

    def _load_cached(self, client: Client, timeout: float | None, **wishes: Any) -> None:
        """Loads what the daemon gives, or what it gives instead; else the source model, on the same
        execution provider.
        """
        deadline = time.monotonic() + (client._timeout if timeout is None else timeout)
        attempts = Attempts()
        for _ in range(2):
            artefact = self._acquire(client, deadline, attempts, wishes)
            if artefact is not None and artefact.claim is not None:
                artefact = self._compile(artefact, deadline, attempts, wishes)
            if artefact is None:
                break
            self._report = attempts.with_(artefact)
            if artefact.outcome == "background":
                self._load_meanwhile(client, artefact, wishes)
                return
            if artefact.fd is None and not artefact.view:
                self._load_plain()
                return
            refusal = self._load_artefact(artefact)
            if refusal is None:
                return
            if not self._tell(client, artefact, refusal, attempts):
                break
        self._report = attempts.without()
        self._load_plain()

    def _acquire(
        self, client: Client, deadline: float, attempts: Attempts, wishes: Mapping[str, Any]
    ) -> Artefact | None:
        def ask() -> Artefact:
            return self._wanted.question(client, wishes)(
                timeout=max(0.0, deadline - time.monotonic())
            )

        return answered(ask, attempts)

    def _compile(
        self, claimed: Artefact, deadline: float, attempts: Attempts, wishes: Mapping[str, Any]
    ) -> Artefact | None:
        """Compiles under a claim, and returns what the daemon made of it; None if that brought
        nothing.
        """
        wanted, record, started = self._wanted, self._wanted.record, time.perf_counter()
        assert record is not None
        try:
            # what starts processes is not loaded where there is nothing to compile
            from . import _compile
        except ImportError as error:  # a process that gave up the rights to read it
            assert claimed.claim is not None
            claimed.claim.give_up(str(error))
            attempts.said.append(f"cannot compile here: {error}")
            return None
        job = _compile.Job(
            source=wanted.source if isinstance(wanted.source, bytes) else os.fspath(wanted.source),
            plugins=wanted.plugins,
            ort_library=_plugins.runtime(wanted.plugins).ort_library,
            dims=record.dims,
            dims_by_denotation=record.dims_by_denotation,
            directory=record.entries.get(DIRECTORY_ENTRY, ""),
            embed=wishes["embed"],
            deadline=deadline,
            progress=wishes["progress"],
        )
        try:
            return _compile.run(job, claimed)
        except (_errors.Error, OSError, ValueError) as error:
            if _crashed(error):
                raise
            attempts.said.append(f"compiled here under a claim: {error}")
            return None
        finally:
            attempts.seconds += time.perf_counter() - started

    def _load_meanwhile(
        self, client: Client, artefact: Artefact, wishes: Mapping[str, Any]
    ) -> None:
        quiet = {**wishes, "progress": None}
        self._report._pending = Pending(client, artefact.job, self._wanted.question(client, quiet))
        if not self._meanwhile:
            self._load_plain()
            return
        assert self._wanted.record is not None
        self._load(
            self._wanted.source,
            self._wanted.record.replay(only_running=True),
            providers=[self._meanwhile],
        )

    def _load_artefact(self, artefact: Artefact) -> Refusal | None:
        """Returns what ONNX Runtime, or the execution provider, has against the artefact; None if
        it is loaded.
        """
        before = self.__dict__.copy()
        try:
            self._load_view(artefact)
            self._check_providers()
        except Exception as error:
            # What was made, perhaps, and is not as it should be, must not outlive the lease. ONNX
            # Runtime's parts hold it from many attributes, and the error from its traceback.
            self.__dict__.clear()
            self.__dict__.update(before)
            return refusal_of(error)
        # The pybind session, and not this object: an IOBinding keeps that one alive.
        lease = weakref.finalize(self._sess, artefact.close)
        # The end of the process closes the descriptor, and no earlier than the session needs it.
        lease.atexit = False  # type: ignore[misc]
        return None

    def _tell(
        self, client: Client, artefact: Artefact, refusal: Refusal, attempts: Attempts
    ) -> bool:
        """Reports a refusal, in bounded time; returns whether the daemon has something else. The
        lease ends here.
        """
        started = time.perf_counter()
        attempts.warnings = list(artefact.warnings)
        attempts.said.append(f"the compiled model does not load: {refusal.text}")
        try:
            if refusal.code is None or not artefact.build:
                return False  # nothing that the daemon could look into
            decision = client.report(
                artefact, refusal.code, refusal.text, runtime=_plugins.runtime(self._wanted.plugins)
            )
        except (_errors.Error, OSError) as error:
            attempts.said.append(f"the daemon has not answered the report: {error}")
            return False
        finally:
            # Only now: what the daemon looks into is what was loaded.
            artefact.close()
            attempts.seconds += time.perf_counter() - started
        attempts.decisions.append(decision)
        attempts.said.append(f"the daemon says {decision}")
        return decision.decision == "retry"

    def _load_view(self, artefact: Artefact) -> None:
        path = artefact.path if artefact.fd is not None else artefact.view_path
        try:
            self._load(path, self._options_for(artefact))
        except Exception as error:
            # External initializers: ONNX Runtime resolves the directory's real path, and may not
            # look there.
            if path == artefact.view_path or "canonical path" not in str(error):
                raise
            with artefact.mapped_files() as files:
                self._load_with_files(artefact, files)

    def _load_with_files(self, artefact: Artefact, files: Mapping[str, Any]) -> None:
        """Hands ONNX Runtime what stands beside the graph, so that it opens none of it by name."""
        options = self._options_for(artefact)
        options.add_external_initializers_from_files_in_memory(
            list(files), list(files.values()), [len(data) for data in files.values()]
        )
        try:
            self._load(artefact.path, options)
        except Exception as error:
            if "canonical path" not in str(error):
                raise
            self._load(artefact.view_path, self._options_for(artefact))

    def _options_for(self, artefact: Artefact) -> ort.SessionOptions:
        """Returns the options that the artefact has to be loaded with, and what the application
        said of running.
        """
        assert self._wanted.record is not None
        options = self._wanted.record.replay(only_running=True)
        for key, value in artefact.load_options().items():
            options.add_session_config_entry(key, value)
        if artefact.graph_optimization_level:
            options.graph_optimization_level = LEVELS_BY_NAME[artefact.graph_optimization_level]
        for p in self._wanted.plugins:
            p.add_to(options, artefact.provider_options.get(p.ep.name, p.ep.options))
        return options

    def _load_plain(self) -> None:
        """Loads the source model as plain ONNX Runtime does, on the execution providers that were
        asked for.
        """
        wanted = self._wanted
        options = (
            wanted.options if wanted.record is None else wanted.record.replay(only_running=False)
        )
        assert options is not None  # without any there is a record, an empty one
        if wanted.given is not None:
            self._load(wanted.source, options, *wanted.given)
            return
        wanted.add_providers(options)
        self._load(wanted.source, options)

    def _load(
        self,
        source: Source,
        options: ort.SessionOptions,
        providers: Any = None,
        provider_options: Any = None,
    ) -> None:
        started = time.perf_counter()
        # enable_fallback: or ONNX Runtime prints an "EP Error" and goes on with the CPU execution
        # provider.
        super().__init__(
            source, options, providers, provider_options, enable_fallback=0, **self._wanted.more
        )
        self._report.load_seconds = time.perf_counter() - started
        self._report.path = "" if isinstance(source, bytes) else os.fspath(source)
        # What the application knows the model by, and what is loaded if it is ever loaded again.
        self._model_path: str | None = None
        self._model_bytes: bytes | None = None
        if isinstance(self._wanted.source, bytes):
            self._model_bytes = self._wanted.source
        else:
            self._model_path = os.fspath(self._wanted.source)

    def _check_providers(self) -> None:
        missing = {p.ep.name for p in self._wanted.plugins} - set(self.get_providers())
        if missing:
            raise _errors.Unavailable(
                f"the session has {', '.join(self.get_providers())}, and not {', '.join(missing)}"
            )


def answered(ask: Callable[[], Artefact], attempts: Attempts) -> Artefact | None:
    """What the daemon answers; None, and noted, where it answers with nothing that a session could
    be made from.
    """
    started = time.perf_counter()
    try:
        return ask()
    except (_errors.Error, OSError) as error:
        if _crashed(error):
            raise
        if isinstance(error, _errors.NoDaemon) and not attempts.said:
            attempts.outcome = "no daemon"
        attempts.said.append(str(error))
        return None
    finally:
        attempts.seconds += time.perf_counter() - started


def _crashed(error: BaseException) -> bool:
    """Whether the model made the execution provider crash. Workers that were killed from outside do
    not count.
    """
    return isinstance(error, _errors.CompileFailed) and error.facts.get("reason") == "crash"
