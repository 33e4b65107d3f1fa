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

# Seconds that a session waits for a daemon that stopped during its request: longer than a restart,
# but shorter than most compiles in this process.
RESTART_LIMIT = 2.0

_ACTIONS = ("wait", "background", "claim", "fail", "fetch", "refresh", "bypass")
_PASSED_ON = frozenset(("read_config_from_model", "disabled_optimizers", "enable_fallback"))


_default_client: Client | None = None
_default_lock = _thread.allocate_lock()


def shared_client() -> Client:
    """Returns the client of all sessions that have no other, so that they share its connections."""
    global _default_client
    with _default_lock:
        if _default_client is None:
            _default_client = Client(restart_limit=RESTART_LIMIT)
        return _default_client


class InferenceSession(ort.InferenceSession):  # type: ignore[misc]
    """ONNX Runtime's InferenceSession on the execution providers `ep`, from the cache if possible.

    `ep` may be omitted if `sess_options` names devices, or `providers` is given as for ONNX
    Runtime, which gets that list itself, with its own fallback, if no plugin is in it.
    `sess_options` has to be an epcache.SessionOptions; with ONNX Runtime's own the session is a
    plain one. `client` is the client to use; False disables the cache. `on_miss` (wait, background,
    claim, fail, fetch, refresh or bypass), `embed`, `output`, `store`, `keep_going`, `adopt` and
    `timeout` are those of Client.acquire. Other arguments are ONNX Runtime's
    (`read_config_from_model`, `disabled_optimizers`, `enable_fallback`).

    on_miss="background" makes a plain session while the daemon compiles; `session.epcache.ready`
    reports when a new session would come from the cache. `meanwhile` names one of ONNX Runtime's
    own execution providers for the plain session, such as "CPUExecutionProvider"; without it the
    plain session is on `ep`, and compiles as well.

    on_miss="claim" compiles with this process's own libraries and stores the result: in epcached's
    worker as a child process, or in this process if there is no worker or the execution provider is
    part of ONNX Runtime. Other requests for the model wait. "wait" does the same if the daemon runs
    as another user and has no equal libraries.

    If the execution provider has no device on this machine, the session is a plain one on the CPU,
    with a warning. Raises ONNX Runtime's errors; Unavailable if the execution provider is not
    installed, or lists other devices than the named one; and CompileFailed if the model crashed the
    execution provider in the daemon's worker, because it would crash this process too.
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
            raise TypeError(f"InferenceSession has no parameter {', '.join(sorted(unknown))}")
        if meanwhile and (
            on_miss != "background" or meanwhile not in ort.get_available_providers()
        ):
            raise ValueError(
                f"meanwhile={meanwhile!r}: it needs on_miss='background' and an execution "
                "provider built into ONNX Runtime"
            )
        if on_miss not in _ACTIONS:
            raise ValueError(
                f"on_miss {on_miss!r}: must be one of {', '.join(_ACTIONS)} for a session"
            )
        if output is not None and on_miss == "claim":
            raise ValueError("output= cannot be used with on_miss='claim'")
        falls_back = kwargs.pop("enable_fallback", None)
        self._own_fallback = 1 if falls_back is None else falls_back
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
        # For errors of run() only: the load itself never falls back to the CPU.
        if falls_back:
            self.enable_fallback()
        if text := self._warning(client):
            warnings.warn(_errors.printable(text), _errors.EpcacheWarning, stacklevel=2)

    _own_fallback: Any = 1  # ONNX Runtime's enable_fallback for the program's own `providers`
    _is_own = False  # whether it is ONNX Runtime's session for these

    def _begin(self, wanted: SessionRequest) -> None:
        """Sets the request; _load makes the session itself."""
        self._wanted = wanted
        self._report = Report("failed")

    def _warning(self, client: Client | bool | None) -> str:
        """Returns the text of the one warning for the application; "" if there is nothing to
        report.
        """
        texts = list(self._wanted.missing)
        if self._report.outcome in ("bypassed", "no daemon", "failed") and client is not False:
            why = self._report.why.removeprefix(self._report.outcome + ": ")
            how = "the model is compiled in this process"
            if self._is_own or not self._wanted.plugins:
                how = f"the session runs on {', '.join(self.get_providers())}"
            texts.insert(0, f"{self._report.outcome}: {why}; {how}")
        return "; ".join(texts)

    @property
    def epcache(self) -> Report:
        """Where this session came from, why, and how long that took."""
        return self._report

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """As in ONNX Runtime: makes a plain session of the source model."""
        if self._report.cached:
            self._report = Report("bypassed", "set_providers was called")
            record = self._wanted.record or Record()
            self._sess_options_initial = record.replay(only_running=False)
        super().set_providers(providers, provider_options)

    def _load_cached(self, client: Client, timeout: float | None, **wishes: Any) -> None:
        """Loads the daemon's artefact; if that fails, requests another one once; then falls back to
        the source model on the same execution provider.
        """
        deadline = time.monotonic() + (client._timeout if timeout is None else timeout)
        attempts = Attempts()
        for _ in range(2):
            artefact = self._acquire(client, deadline, attempts, wishes)
            if artefact is not None and artefact.claim is not None:
                artefact = self._compile(artefact, deadline, attempts, wishes)
            if artefact is None:
                break
            self._report = attempts.report(artefact)
            if artefact.outcome == "background":
                self._load_meanwhile(client, artefact, wishes)
                return
            if artefact.fd is None and not artefact.view:
                self._load_plain()
                return
            refusal = self._load_artefact(artefact)
            if refusal is None:
                return
            if not self._report_refusal(client, artefact, refusal, attempts):
                break
        self._report = attempts.fallback_report()
        self._load_plain()

    def _acquire(
        self, client: Client, deadline: float, attempts: Attempts, wishes: Mapping[str, Any]
    ) -> Artefact | None:
        def ask() -> Artefact:
            return self._wanted.question(client, wishes)(
                timeout=max(0.0, deadline - time.monotonic())
            )

        return ask_or_fall_back(ask, attempts)

    def _compile(
        self, claimed: Artefact, deadline: float, attempts: Attempts, wishes: Mapping[str, Any]
    ) -> Artefact | None:
        """Compiles under a claim and returns the stored build; None if that failed."""
        wanted, record, started = self._wanted, self._wanted.record, time.perf_counter()
        assert record is not None
        try:
            # imported here, because it imports much that a hit does not need
            from . import _compile
        except ImportError as error:  # the process dropped the privileges to read it
            assert claimed.claim is not None
            claimed.claim.give_up(str(error))
            attempts.reasons.append(f"cannot compile in this process: {error}")
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
            attempts.reasons.append(f"the compile under a claim failed: {error}")
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
        """Loads the artefact. Returns None if that succeeded, else the error of ONNX Runtime or the
        execution provider.
        """
        before = self.__dict__.copy()
        try:
            self._load_view(artefact)
            self._check_providers()
        except Exception as error:
            # A partly made session must not outlive the lease. Attributes refer to it, and so does
            # the error's traceback.
            self.__dict__.clear()
            self.__dict__.update(before)
            return refusal_of(error)
        # The lease ends with the pybind session and not with this object, because an IOBinding
        # keeps only the former alive.
        lease = weakref.finalize(self._sess, artefact.close)
        # At exit the kernel closes the descriptor; the session may still need it until then.
        lease.atexit = False  # type: ignore[misc]
        return None

    def _report_refusal(
        self, client: Client, artefact: Artefact, refusal: Refusal, attempts: Attempts
    ) -> bool:
        """Reports a refusal and releases the lease. Returns whether the daemon may have another
        build.
        """
        started = time.perf_counter()
        attempts.warnings = list(artefact.warnings)
        attempts.reasons.append(f"the compiled model does not load: {refusal.text}")
        try:
            if refusal.code is None or not artefact.build:
                return False  # nothing that the daemon could verify
            decision = client.report(
                artefact, refusal.code, refusal.text, runtime=_plugins.runtime(self._wanted.plugins)
            )
        except (_errors.Error, OSError) as error:
            attempts.reasons.append(f"the daemon has not answered the report: {error}")
            return False
        finally:
            # Not earlier, because the daemon verifies the loaded files during the report.
            artefact.close()
            attempts.seconds += time.perf_counter() - started
        attempts.decisions.append(decision)
        attempts.reasons.append(f"the daemon says {decision}")
        return decision.decision == "retry"

    def _load_view(self, artefact: Artefact) -> None:
        path = artefact.path if artefact.fd is not None else artefact.view_path
        try:
            self._load(path, self._options_for(artefact))
        except Exception as error:
            # For external initializers ONNX Runtime resolves the directory's real path, to which
            # this user may not have access.
            if path == artefact.view_path or "canonical path" not in str(error):
                raise
            with artefact.mapped_files() as files:
                self._load_with_files(artefact, files)

    def _load_with_files(self, artefact: Artefact, files: Mapping[str, Any]) -> None:
        """Passes the files beside the graph in memory, so that ONNX Runtime opens none by name."""
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
        """Returns the options to load the artefact with: the artefact's, and those of the
        application that affect how a session runs.
        """
        assert self._wanted.record is not None
        options = self._wanted.record.replay(only_running=True)
        for key, value in artefact.load_options().items():
            options.add_session_config_entry(key, value)
        if artefact.graph_optimization_level:
            options.graph_optimization_level = LEVELS_BY_NAME[artefact.graph_optimization_level]
        for p in self._wanted.plugins:
            p.add_to(options, artefact.provider_options.get(p.ep.name, p.given))
        return options

    def _load_plain(self) -> None:
        """Loads the source model with plain ONNX Runtime on the requested execution providers."""
        wanted = self._wanted
        options = (
            wanted.options if wanted.record is None else wanted.record.replay(only_running=False)
        )
        assert options is not None  # because without options there is an empty record
        if not wanted.is_own():
            try:
                wanted.add_providers(options)
                self._load(wanted.source, options)
                return
            except Exception:
                # One that is built into ONNX Runtime may lack its device or libraries.
                if wanted.given is None or all(p.library is not None for p in wanted.plugins):
                    raise
                options = wanted.record.replay(only_running=False) if wanted.record else options
        assert wanted.given is not None
        self._is_own = True
        self._load(wanted.source, options, *wanted.given, enable_fallback=self._own_fallback)

    def _load(
        self,
        source: Source,
        options: ort.SessionOptions,
        providers: Any = None,
        provider_options: Any = None,
        enable_fallback: Any = 0,
    ) -> None:
        started = time.perf_counter()
        # By default 0, otherwise ONNX Runtime prints "EP Error" and uses the CPU execution
        # provider.
        super().__init__(
            source,
            options,
            providers,
            provider_options,
            enable_fallback=enable_fallback,
            **self._wanted.more,
        )
        self._report.load_seconds = time.perf_counter() - started
        self._report.path = "" if isinstance(source, bytes) else os.fspath(source)
        # The source model, for ONNX Runtime's methods that load it again.
        self._model_path: str | None = None
        self._model_bytes: bytes | None = None
        if isinstance(self._wanted.source, bytes):
            self._model_bytes = self._wanted.source
        else:
            self._model_path = os.fspath(self._wanted.source)

    def _check_providers(self) -> None:
        if self._is_own:
            return
        missing = {p.ep.name for p in self._wanted.plugins} - set(self.get_providers())
        if missing:
            raise _errors.Unavailable(
                f"the session runs on {', '.join(self.get_providers())}, not on "
                f"{', '.join(missing)}"
            )


def ask_or_fall_back(ask: Callable[[], Artefact], attempts: Attempts) -> Artefact | None:
    """Returns the daemon's answer; None, with the reason added to `attempts`, if the session has to
    fall back. Raises the error if the model crashed the execution provider.
    """
    started = time.perf_counter()
    try:
        return ask()
    except (_errors.Error, OSError) as error:
        if _crashed(error):
            raise
        if isinstance(error, _errors.NoDaemon) and not attempts.reasons:
            attempts.outcome = "no daemon"
        attempts.reasons.append(str(error))
        return None
    finally:
        attempts.seconds += time.perf_counter() - started


def _crashed(error: BaseException) -> bool:
    """Whether the model crashed the execution provider; not if the worker was killed by others."""
    return isinstance(error, _errors.CompileFailed) and error.facts.get("reason") == "crash"
