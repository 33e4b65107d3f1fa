"""An acquire: the request for a compiled model, with the files that the daemon asks for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from . import _errors, _wire
from ._artefact import Artefact, Progress, artefact
from ._autostart import PATIENCE
from ._call import Call
from ._connection import Connection, close_all
from ._connections import Connections
from ._messages import ENUMS
from ._model import Model, stamp_of
from ._request import ExecutionProvider, Runtime, Send

_PATIENT = [ENUMS["OnMiss"][name] for name in ("WAIT", "REFRESH", "CLAIM", "KEY_ONLY", "EXPLAIN")]


class _OwnDaemon(_errors.Unavailable):
    """The daemon has no such libraries, and one of the user's own may run them."""


class Acquire(Call[Artefact]):
    """One acquire, with the external data that the daemon asks for.

    A daemon that does not have the libraries says what can be asked instead (the fact "instead"):
    with all libraries shown, for a claim, if `claims` says that the caller can compile, or of a
    daemon of the user's own.
    """

    def __init__(
        self,
        connections: Connections,
        models: list[Model],
        eps: list[ExecutionProvider],
        runtime: Runtime | None,
        request: _wire.Message,
        deadline: float,
        progress: Callable[[Progress], None] | None,
        claims: bool = False,
    ) -> None:
        super().__init__(connections, deadline, progress)
        self.models = models  # more than one: a group
        self.eps = eps
        self.runtime = connections.shown(runtime)
        self.claims = claims
        self.request = request
        # A request that waits for a compile waits for the daemon's start as well; others do not.
        self.patience = PATIENCE if request["on_miss"] in _PATIENT else 0.0
        self.own = connections.may_start_own(self.patience)
        self.sources: dict[str, tuple[int, ...]] = {}  # path -> stamp of what was sent last

    def run(self) -> Artefact:
        try:
            return super().run()
        except _OwnDaemon:
            self.own = False
            connection = self.connections.start_own(self.deadline, self.patience or 0.0)
            if connection is None:
                return super().run()
            # the user's own daemon is asked first from now on, by each new connection
            self.connections.close()
            return self._with(connection)

    def _rounds(self, connection: Connection) -> Artefact:
        """Asks, and asks for what the daemon can do instead if it does not have the libraries."""
        while True:
            try:
                return self._located(connection)
            except _errors.Unavailable as error:
                if not self._instead(error):
                    raise

    def _instead(self, error: _errors.Unavailable) -> bool:
        """Turns the request into the first that the daemon proposes instead and that can be asked;
        False where there is none.
        """
        for way in error.facts.get("instead", "").split():
            if (
                way == "show"
                and self.runtime is not None
                and (shown := self.runtime.showing()) is not None
            ):
                self.runtime = shown
                self.connections.show(shown)
                return True
            if (
                way == "claim"
                and self.claims
                and self.request["on_miss"] == ENUMS["OnMiss"]["WAIT"]
            ):
                self.request = {**self.request, "on_miss": ENUMS["OnMiss"]["CLAIM"]}
                return True
            if way == "own" and self.own:
                raise _OwnDaemon(error.text, error.hint, error.facts) from error
        return False

    def _located(self, connection: Connection) -> Artefact:
        """Sends the request; sends it again with the external data that the daemon asks for."""
        locations = [self.connections.known_locations(model.stamp) for model in self.models]
        for _ in range(3):
            answer = self._ask(connection, locations)
            if isinstance(answer, Artefact):
                answer.connect_seconds = self.connect_seconds
                answer.server = connection.server
                return answer
            for number, more in answer.items():
                locations[number] = more
                self.connections.remember(self.models[number].stamp, more)
        raise _errors.ProtocolError("the daemon requests external data again and again")

    def _done(self, connection: Connection, result: Artefact) -> None:
        """A claim hangs on the connection that it was given on, which is no other request's from
        then on.
        """
        if result.claimed is None:
            self.connections.give_back(connection)
            return
        from ._claim import Claim  # only few requests get one

        result.claim = Claim(self.connections, connection, result.claimed, self.sources)

    def _ask(
        self, connection: Connection, locations: list[list[str]]
    ) -> Artefact | dict[int, list[str]]:
        """Returns the answer, or the locations that the daemon asks for, by the number of the
        model.
        """
        with self._opened(locations) as (body, descriptors):
            connection.start({"acquire": body}, descriptors, self.deadline)
            envelope, received = self._answer(connection)
        try:
            if "need" in envelope:
                return self._needed(envelope["need"])
            reply = envelope.get("acquire_reply")
            if reply is None:
                raise _errors.ProtocolError("unexpected answer of the daemon to Acquire")
            result = artefact(reply, received)
            result.round_trip_seconds = connection.received_at - connection.sent_at
            return result
        finally:
            close_all(received)

    def _needed(self, need: _wire.Message) -> dict[int, list[str]]:
        locations = _checked_locations(need["locations"])
        members = need["members"] or [0] * len(locations)
        if len(members) != len(locations) or any(member >= len(self.models) for member in members):
            raise _errors.ProtocolError(
                "the daemon requests external data of a model that is not in the request"
            )
        wanted: dict[int, list[str]] = {}
        for member, location in zip(members, locations, strict=True):
            wanted.setdefault(member, []).append(location)
        return wanted

    @contextlib.contextmanager
    def _opened(self, locations: list[list[str]]) -> Iterator[tuple[_wire.Message, list[int]]]:
        """Yields the Acquire and its descriptors; those that were opened for it are closed
        afterwards.
        """
        with contextlib.ExitStack() as stack:
            descriptors: list[int] = []
            self.sources = {}

            def send(descriptor: int) -> int:
                descriptors.append(descriptor)
                return len(descriptors) - 1

            body = dict(self.request)
            messages = [
                self._model_message(model, wanted, send, stack)
                for model, wanted in zip(self.models, locations, strict=True)
            ]
            body["model"], body["group"] = messages[0], messages[1:]
            body["eps"] = [ep.message(send, stack) for ep in self.eps]
            if self.runtime is not None:
                body["runtime"] = self.runtime.message(send, stack)
            yield body, descriptors

    def _model_message(
        self, model: Model, locations: list[str], send: Send, stack: contextlib.ExitStack
    ) -> _wire.Message:
        number = send(model.fd)
        if model.path:
            self.sources[model.path] = stamp_of(model.fd)
        external = []
        for location in locations:
            descriptor = model.open_external(location)
            stack.callback(os.close, descriptor)
            if model.directory and model.external is None:
                self.sources[os.path.join(model.directory, location)] = stamp_of(descriptor)
            external.append({"location": location, "fd": send(descriptor)})
        return {
            "fd": number,
            "name": model.name,
            "external": external,
            "path": _sendable(model.path),
        }


def _sendable(path: str) -> str:
    """Returns the path for display, cut to the protocol's limit."""
    try:
        return path if len(path.encode()) <= 4096 else ""
    except UnicodeEncodeError:
        return ""


def _checked_locations(locations: list[str]) -> list[str]:
    """A client opens only what lies below the model's directory, whatever the daemon, or the model,
    asks for.
    """
    for location in locations:
        if not _stays_below(location):
            raise _errors.BadModel(f"external data {location!r} is outside the model's directory")
    if len(locations) > 4096 - 64:
        raise _errors.BadModel(
            f"the model refers to {len(locations)} files of external data: too many"
        )
    return locations


def _stays_below(location: str) -> bool:
    """Whether external data lies below the model's directory by its spelling. ONNX Runtime opens
    "./w", "s//w" and "s/../w".
    """
    depth = 0
    for part in location.split("/"):
        if part in ("", "."):
            continue
        depth += -1 if part == ".." else 1
        if depth < 0:
            return False
    return depth > 0 and not location.startswith("/") and "\0" not in location
