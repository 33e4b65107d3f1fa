"""sessions: the models of a weight-sharing group, as sessions of one process."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import onnxruntime as ort

from . import _errors
from ._artefact import Artefact, Progress
from ._client import Client
from ._plugins import Plugin
from ._refusal import Refusal
from ._report import Attempts, Report
from ._request import EPSpec
from ._session import InferenceSession, _answered, _prepare, _shared_client
from ._session_options import Record


def sessions(
    models: Sequence[str | bytes | os.PathLike[str]],
    sess_options: ort.SessionOptions | None = None,
    *,
    ep: EPSpec | Sequence[EPSpec] | None = None,
    client: Client | bool | None = None,
    on_miss: str = "wait",
    store: str = "",
    timeout: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Sessions:
    """Returns a session for each of the models, which are compiled as one weight-sharing group, in this order.

    The sessions are created in this order in this process, with the options that make the execution provider share what
    the models have in common, and have to be destroyed in reverse: close the result, or use it as a context. All hold the lease.

    The arguments are those of InferenceSession; `on_miss` is wait, fail, refresh or bypass. Where the cache cannot give the
    whole group, every session is a plain one.
    """
    if len(models) < 2:
        raise ValueError(f"a group has two models or more, not {len(models)}")
    if on_miss not in ("wait", "fail", "refresh", "bypass"):
        raise ValueError(f"on_miss {on_miss!r}: for a group it is wait, fail, refresh or bypass")
    record = Record() if sess_options is None else getattr(sess_options, "_record", None)
    group = _Group(models, sess_options, record, _prepare(ep, sess_options, record))
    made = group.begin()
    if reason := made[0]._why_not(client, on_miss):
        report = Report("bypassed", reason)
        loaded = group.plain(report)
    else:
        asked = client if isinstance(client, Client) else _shared_client()
        deadline = time.monotonic() + (asked._timeout if timeout is None else timeout)
        loaded, report = group.cached(asked, deadline, on_miss=on_miss, store=store, progress=progress)
    if report.outcome in ("bypassed", "no daemon", "failed") and client is not False:
        text = f"{report.outcome}: {report.why}; the models are compiled in this process"
        warnings.warn(text, _errors.EpcacheWarning, stacklevel=2)
    return Sessions(loaded)


class Sessions(Sequence[InferenceSession]):
    """The sessions of a group, in order."""

    def __init__(self, loaded: list[InferenceSession]) -> None:
        self._sessions = loaded

    @overload
    def __getitem__(self, index: int) -> InferenceSession: ...
    @overload
    def __getitem__(self, index: slice) -> list[InferenceSession]: ...
    def __getitem__(self, index: int | slice) -> InferenceSession | list[InferenceSession]:
        return self._sessions[index]

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[InferenceSession]:
        return iter(self._sessions)

    def close(self) -> None:
        """Destroys the sessions, the last one first; none of them can be used afterwards. May be called again."""
        _destroy(self._sessions)

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Sessions that the application holds live on; the others go in the order that is asked of them.
        while getattr(self, "_sessions", None):
            self._sessions.pop()


def _destroy(loaded: list[InferenceSession]) -> None:
    while loaded:
        # ONNX Runtime's parts hold its session from many attributes, and the application perhaps this object.
        loaded.pop().__dict__.clear()


class _Lease:
    """The lease on a group's view: it ends with the last of the sessions that were made from it."""

    def __init__(self, artefact: Artefact, count: int) -> None:
        self._artefact = artefact
        self._left = count
        self._lock = threading.Lock()

    def drop(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._artefact.close()


class _MemberArtefact(Artefact):
    """One member of a group. All have one descriptor: an execution provider knows what it shares by the path of the file."""

    _lease: _Lease | None = None

    def _release(self) -> None:
        with self._lock:
            held, self.fd = self.fd, None
            lease, self._lease = self._lease, None
        if held is not None and lease is not None:
            lease.drop()


def member_artefacts(artefact: Artefact) -> list[Artefact]:
    """Splits a group's artefact into one for each member, as several of them are loaded in one process. They take its lease."""
    lease = _Lease(artefact, len(artefact.members))
    parts: list[Artefact] = []
    for i, member in enumerate(artefact.members):
        fields = {name: getattr(artefact, name) for name in artefact.__dataclass_fields__ if name != "_lock"}
        fields.update(
            graph=member.graph,
            member=i,
            model_digest=member.model_digest,
            session_options={**artefact.session_options, **member.session_options},
        )
        one = _MemberArtefact(**fields)
        one._lease = lease
        parts.append(one)
    return parts


class _GroupSession(InferenceSession):
    """A session of a group. What it is made from comes from the group."""

    def __init__(self, group: _Group, source: str | bytes | os.PathLike[str]) -> None:
        self._source, self._source_options, self._more = source, group.options, {}
        self._meanwhile = ""
        self._record, self._plugins = group.record, group.plugins
        self._report = Report("failed")


class _Group:
    """The models of a group and how they are to be loaded."""

    def __init__(
        self,
        models: Sequence[str | bytes | os.PathLike[str]],
        options: ort.SessionOptions | None,
        record: Record | None,
        plugins: list[Plugin],
    ) -> None:
        self.models = list(models)
        self.options = options
        self.record = record
        self.plugins = plugins

    def begin(self) -> list[InferenceSession]:
        """Returns a session object for each model, without ONNX Runtime's session yet."""
        return [_GroupSession(self, model) for model in self.models]

    def plain(self, report: Report) -> list[InferenceSession]:
        """Loads the source models as plain ONNX Runtime does; they share nothing."""
        loaded: list[InferenceSession] = []
        try:
            for session in self.begin():
                session._report = replace(report)
                session._load_plain()
                session._check_providers()
                loaded.append(session)
        except BaseException:
            _destroy(loaded)
            raise
        return loaded

    def cached(
        self, client: Client, deadline: float, **wishes: Any
    ) -> tuple[list[InferenceSession], Report]:
        """Loads what the daemon gives, or what it gives instead; else the source models."""
        attempts = Attempts()
        for _ in range(2):
            artefact = self._acquire(client, deadline, attempts, wishes)
            if artefact is None:
                break
            if len(artefact.members) != len(self.models) or artefact.fd is None:
                artefact.close()
                attempts.said.append(f"the daemon gave {len(artefact.members)} graphs for {len(self.models)} models")
                break
            report = attempts.with_(artefact)
            loaded, refusal = self._load(artefact, attempts)
            if refusal is None:
                return loaded, report
            if not loaded[0]._tell(client, artefact, refusal, attempts):
                break
        report = attempts.without()
        return self.plain(report), report

    def _acquire(
        self, client: Client, deadline: float, attempts: Attempts, wishes: dict[str, Any]
    ) -> Artefact | None:
        first = self.begin()[0]

        def ask() -> Artefact:
            question = first._question(client, {**wishes, "group": self.models[1:]})
            return question(timeout=max(0.0, deadline - time.monotonic()))

        return _answered(ask, attempts)

    def _load(self, artefact: Artefact, attempts: Attempts) -> tuple[list[InferenceSession], Refusal | None]:
        """Loads the members in order. Where one does not load, those before it are destroyed, and the lease stays the artefact's."""
        # The members' lease is one of a second descriptor: the daemon looks into what was refused as long as the first is open.
        held = replace(artefact, fd=os.dup(artefact.fd), _lock=threading.Lock())  # type: ignore[arg-type]
        parts, made = member_artefacts(held), self.begin()
        loaded: list[InferenceSession] = []
        refusal: Refusal | None = None
        try:
            for part, session in zip(parts, made, strict=True):
                session._report = replace(attempts.with_(artefact), model_digest=part.model_digest)
                if refusal := session._load_artefact(part):
                    break
                loaded.append(session)
        finally:
            if len(loaded) < len(parts):
                _destroy(loaded)
                for part in parts:
                    part.close()
        if refusal is None:
            artefact.close()
            return loaded, None
        return made, refusal
