"""Sessions with ONNX Runtime's parameters, which are made from the cache if possible."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from .. import _errors, _plugins, _session
from .._artefact import Artefact, Progress
from .._client import Client
from .._onnxruntime import ort
from .._report import Attempts, Report
from . import _report
from ._requested import RequestedSession, requested_session
from ._settings import settings

_KNOWN = frozenset(("enable_fallback", "read_config_from_model", "disabled_optimizers"))

# Whether this process was forked from one with loaded execution providers. A fork has none of their
# threads, and OpenVINO would wait for those forever.
_after_fork = False


def _forked() -> None:
    global _after_fork
    _after_fork = _after_fork or bool(_plugins._registered)


os.register_at_fork(after_in_child=_forked)


class Served(_session.InferenceSession):
    """A session from the cache, with a fallback to the session that the program requested."""

    def __init__(
        self,
        path_or_bytes: Any,
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        **kwargs: Any,
    ) -> None:
        self._arguments = (path_or_bytes, sess_options, providers, provider_options, kwargs)
        self._as_asked = False  # made as the program asked for it, by ONNX Runtime alone
        self._replacing = threading.Lock()
        self._requested = _interpreted(*self._arguments)
        try:
            if self._requested.why:
                self._make_as_asked(Report("bypassed", self._requested.why))
            else:
                self._make()
        except Exception as error:
            _report.add(
                "raised", model=_name(path_or_bytes), why=f"{type(error).__name__}: {error}"
            )
            raise
        self._add_to_report()

    def _make(self) -> None:
        """Makes the session with epcache; if that fails, as the program requested it."""
        path_or_bytes, options, _, _, kwargs = self._arguments
        passed = {name: value for name, value in kwargs.items() if name != "enable_fallback"}
        before = self.__dict__.copy()
        try:
            super().__init__(
                path_or_bytes,
                options,
                ep=self._requested.eps or None,
                on_miss=settings().on_miss,
                **passed,
            )
        except Exception as error:
            if self._as_asked:
                raise  # ONNX Runtime's error for the program's own request
            self.__dict__.clear()
            self.__dict__.update(before)
            self._make_as_asked(Report("failed", _error_text(error)))

    def _make_as_asked(self, report: Report) -> None:
        path_or_bytes, options, providers, provider_options, kwargs = self._arguments
        self._as_asked, self._report = True, report
        ort.InferenceSession.__init__(
            self, path_or_bytes, options, providers, provider_options, **kwargs
        )

    def _acquire(
        self, client: Client, deadline: float, attempts: Attempts, wishes: Mapping[str, Any]
    ) -> Artefact | None:
        """Like the base class, but with verify_output for a model that the program requested on the
        CPU.
        """
        if not self._requested.sent or not settings().verify_output:
            return super()._acquire(client, deadline, attempts, wishes)

        phases = set()

        def noted(progress: Progress) -> None:
            phases.add(progress.phase)
            if wishes.get("progress"):
                wishes["progress"](progress)

        def ask() -> Artefact:
            checked = {**wishes, "verify_output": settings().verify_output, "progress": noted}
            try:
                return self._wanted.question(client, checked)(
                    timeout=max(0.0, deadline - time.monotonic())
                )
            except _errors.CompileFailed as error:
                if error.facts.get("outputs") != "0":
                    raise
            # The model does not run with the sizes that the daemon chose for free dimensions, so
            # the outputs cannot be compared. The build is stored all the same.
            answer = self._wanted.question(client, wishes)(
                timeout=max(0.0, deadline - time.monotonic())
            )
            if answer.outcome == "hit" and "compiling" in phases:
                answer.outcome = "compiled"
            return answer

        return _session.ask_or_fall_back(ask, attempts)

    def _load_plain(self) -> None:
        # A program that requested the CPU must not compile in its own process each time, because
        # that is slower than without epcache.
        if self._requested.sent:
            self._make_as_asked(self._report)
        else:
            super()._load_plain()

    def _check_providers(self) -> None:
        if not self._as_asked:
            super()._check_providers()

    def _warning(self, client: Client | bool | None) -> str:
        return ""  # it is in the report, because a program may turn warnings into errors

    def run(self, *arguments: Any, **named: Any) -> Any:
        try:
            return super().run(*arguments, **named)
        except Exception as error:
            if not self._requested.sent or self._as_asked:
                raise
            failed = error
        # Outside of the handler, so that an error of ONNX Runtime there has no other error as its
        # context.
        return self._run_as_asked(failed, arguments, named)

    def _run_as_asked(
        self, error: Exception, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Runs a plain session after the execution provider of --ep failed.

        If it succeeds, it replaces this session. If it fails as well, the execution provider is not
        the cause, and its error is raised.
        """
        path_or_bytes, options, providers, provider_options, kwargs = self._arguments
        plain = ort.InferenceSession(path_or_bytes, options, providers, provider_options, **kwargs)
        result = plain.run(*arguments, **named)
        with self._replacing:
            if not self._as_asked:
                self.__dict__.update(plain.__dict__)
                self._as_asked = True
                names = ", ".join(ep.name for ep in self._requested.eps)
                self._report = Report("failed", f"{names} failed at run: {error}")
                self._add_to_report()
        return result

    def _add_to_report(self) -> None:
        report = self._report
        _report.add(
            "session",
            model=_name(self._arguments[0]),
            outcome=report.outcome,
            why=report.why,
            asked=self._requested.names,
            sent=self._requested.sent,
            providers=self.get_providers(),
            compatibility=report.compatibility,
            build=report.build,
            compile_seconds=report.compile_seconds,
            acquire_seconds=report.acquire_seconds,
            load_seconds=report.load_seconds,
        )


def _name(source: Any) -> str:
    """Returns the model's name in a report: its path, or a description of bytes."""
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    return (
        os.path.abspath(os.fspath(source))
        if isinstance(source, (str, os.PathLike))
        else type(source).__name__
    )


def _after_fork_reason() -> str:
    """Returns why execution providers do not work in this process, "" if they do."""
    if not _after_fork:
        return ""
    names = ", ".join(sorted(_plugins._registered))
    return f"the process was forked after it had loaded {names}, which does not work in a fork"


def _error_text(error: Exception) -> str:
    """Returns the error's text with a hint for the command line of epcachectl."""
    if not isinstance(error, _errors.Error):
        return f"{type(error).__name__}: {error}"
    if name := error.facts.get("missing_library"):
        return f"{error.text} ({_plugins.command_hint(name)})"
    return str(error)


def _interpreted(
    path_or_bytes: Any, options: Any, providers: Any, provider_options: Any, kwargs: dict[str, Any]
) -> RequestedSession:
    if not isinstance(path_or_bytes, (str, bytes, os.PathLike)):
        return RequestedSession(
            [],
            why=f"the model is neither a path nor bytes but of type {type(path_or_bytes).__name__}",
        )
    if unknown := set(kwargs) - _KNOWN:
        return RequestedSession(
            [], why=f"epcache does not know these arguments: {', '.join(sorted(unknown))}"
        )
    if why := _after_fork_reason():
        return RequestedSession([], why=why)
    try:
        return requested_session(options, providers, provider_options)
    except Exception as error:
        return RequestedSession(
            [], why=f"epcache cannot read the arguments: {type(error).__name__}: {error}"
        )
