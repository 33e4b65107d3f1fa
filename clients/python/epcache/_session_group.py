"""SessionGroup: the models of a weight-sharing group, as sessions of one process."""

from __future__ import annotations

import _thread
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from . import _errors
from ._artefact import Artefact
from ._client import Client
from ._fields import replace
from ._model import not_a_model
from ._onnxruntime import ort
from ._refusal import Refusal
from ._report import Attempts, Report
from ._request import EPSpec
from ._session import InferenceSession, ask_or_fall_back, shared_client
from ._progress_display import Progressing, displayed
from ._session_request import Source, SessionRequest, session_request


class SessionGroup(Sequence[InferenceSession]):
    """Sessions of several models that are compiled as one weight-sharing group, in this order.

    The sessions are created in this order with the options that make the execution provider share
    weights, and have to be destroyed in reverse: close the group, or use it as a context manager.
    All of them hold the lease.

    The arguments are those of InferenceSession; `on_miss` is wait, fail, refresh or bypass. If the
    cache cannot serve the whole group, every session is a plain one. There is no `output`, because
    the daemon names the graphs of a group.

        paths = ["prefill.onnx", "decode.onnx"]
        with epcache.SessionGroup(paths, options, ep="QNNExecutionProvider:NPU") as sessions:
            prefill, decode = sessions
    """

    def __init__(
        self,
        models: Sequence[Source],
        sess_options: ort.SessionOptions | None = None,
        providers: Sequence[str | tuple[str, Mapping[Any, Any]]] | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
        *,
        ep: EPSpec | Sequence[EPSpec] | None = None,
        client: Client | bool | None = None,
        on_miss: str = "wait",
        store: str = "",
        timeout: float | None = None,
        progress: Progressing = None,
    ) -> None:
        self._sessions: list[InferenceSession] = []
        if len(models) < 2:
            raise ValueError(f"a group needs at least two models, not {len(models)}")
        if on_miss not in ("wait", "fail", "refresh", "bypass"):
            raise ValueError(
                f"on_miss {on_miss!r}: must be wait, fail, refresh or bypass for a group"
            )
        for model in models[1:]:
            if not isinstance(model, (str, bytes, os.PathLike)):
                raise not_a_model(model)
        group = _Group(
            models, session_request(models[0], sess_options, ep, providers, provider_options)
        )
        reason = (
            "the application disabled the cache"
            if client is False
            else group.first.why_not(on_miss)
        )
        if reason:
            report = Report("bypassed", reason)
            self._sessions = group.plain(report)
        else:
            asked = client if isinstance(client, Client) else shared_client()
            deadline = time.monotonic() + (asked._timeout if timeout is None else timeout)
            with displayed(progress, f"{len(models)} models") as step:
                self._sessions, report = group.cached(
                    asked, deadline, on_miss=on_miss, store=store, progress=step
                )
        if text := self._sessions[0]._warning(client):
            warnings.warn(_errors.printable(text), _errors.EpcacheWarning, stacklevel=2)

    @overload
    def __getitem__(self, index: int) -> InferenceSession: ...
    @overload
    def __getitem__(self, index: slice) -> list[InferenceSession]: ...
    def __getitem__(self, index: int | slice) -> InferenceSession | list[InferenceSession]:
        return self._sessions[index]

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[InferenceSession]:
        # Not iter(self._sessions): the generator keeps the group alive during the loop, because its
        # __del__ destroys the sessions.
        yield from self._sessions

    def close(self) -> None:
        """Destroys the sessions in reverse order; they cannot be used afterwards. May be called
        again.
        """
        _destroy(self._sessions)

    def __enter__(self) -> SessionGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # In reverse order. Sessions to which the application has references continue to exist.
        while getattr(self, "_sessions", None):
            self._sessions.pop()


def _destroy(loaded: list[InferenceSession]) -> None:
    while loaded:
        # Attributes refer to ONNX Runtime's session, and the application may refer to this object.
        loaded.pop().__dict__.clear()


class _Lease:
    """The lease on a group's view. It ends when the last of the group's sessions is destroyed."""

    def __init__(self, artefact: Artefact, count: int) -> None:
        self._artefact = artefact
        self._left = count
        self._lock = _thread.allocate_lock()

    def drop(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._artefact.close()


class _MemberArtefact(Artefact):
    """One member of a group. All members have the same descriptor, because execution providers
    share weights by the path of the file.
    """

    _lease: _Lease | None = None

    def _release(self) -> None:
        with self._lock:
            held, self.fd = self.fd, None
            lease, self._lease = self._lease, None
        if held is not None and lease is not None:
            lease.drop()


def member_artefacts(artefact: Artefact) -> list[Artefact]:
    """Returns an artefact for each member of a group, to load all of them in one process. They take
    over the lease.
    """
    lease = _Lease(artefact, len(artefact.members))
    parts: list[Artefact] = []
    for i, member in enumerate(artefact.members):
        fields = {
            name: getattr(artefact, name)
            for name in artefact.__dataclass_fields__
            if name != "_lock"
        }
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
    """A session of a group, which loads it later with _load_artefact or _load_plain."""

    def __init__(self, wanted: SessionRequest) -> None:
        self._meanwhile = ""
        self._begin(wanted)


class _Group:
    """The models of a group, and the request of the first one."""

    def __init__(self, models: Sequence[Source], first: SessionRequest) -> None:
        self.models = list(models)
        self.first = first

    def begin(self) -> list[InferenceSession]:
        """Returns a session object for each model, which is not loaded yet."""
        return [_GroupSession(replace(self.first, source=model)) for model in self.models]

    def plain(self, report: Report) -> list[InferenceSession]:
        """Loads the source models as plain ONNX Runtime does, without shared weights."""
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
        """Loads the daemon's artefact; if that fails, requests another one once; then falls back to
        the source models.
        """
        attempts = Attempts()
        for _ in range(2):
            artefact = self._acquire(client, deadline, attempts, wishes)
            if artefact is None:
                break
            if len(artefact.members) != len(self.models) or artefact.fd is None:
                artefact.close()
                attempts.reasons.append(
                    f"the daemon returned {len(artefact.members)} graphs for {len(self.models)} "
                    "models"
                )
                break
            report = attempts.report(artefact)
            loaded, refusal = self._load(artefact, attempts)
            if refusal is None:
                return loaded, report
            if not loaded[0]._report_refusal(client, artefact, refusal, attempts):
                break
        report = attempts.fallback_report()
        return self.plain(report), report

    def _acquire(
        self, client: Client, deadline: float, attempts: Attempts, wishes: dict[str, Any]
    ) -> Artefact | None:
        def ask() -> Artefact:
            question = self.first.question(client, {**wishes, "group": self.models[1:]})
            return question(timeout=max(0.0, deadline - time.monotonic()))

        return ask_or_fall_back(ask, attempts)

    def _load(
        self, artefact: Artefact, attempts: Attempts
    ) -> tuple[list[InferenceSession], Refusal | None]:
        """Loads the members in order. If one does not load, the earlier ones are destroyed, and the
        artefact keeps the lease.
        """
        # The members use a duplicate descriptor, because the original has to stay open while the
        # daemon verifies a refused artefact.
        descriptor = os.dup(artefact.fd)  # type: ignore[arg-type]
        held = replace(artefact, fd=descriptor, _lock=_thread.allocate_lock())
        parts, made = member_artefacts(held), self.begin()
        loaded: list[InferenceSession] = []
        refusal: Refusal | None = None
        try:
            for part, session in zip(parts, made, strict=True):
                session._report = replace(attempts.report(artefact), model_digest=part.model_digest)
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
