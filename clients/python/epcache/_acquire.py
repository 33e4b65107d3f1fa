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
from ._model import Model, display_name, stamp_of
from ._request import ExecutionProvider, Runtime, Send

_PATIENT = [ENUMS["OnMiss"][name] for name in ("WAIT", "REFRESH", "CLAIM", "KEY_ONLY", "EXPLAIN")]


class _NeedsUserDaemon(_errors.Unavailable):
    """The daemon does not have the libraries, and proposes a daemon that this user runs."""


class Acquire(Call[Artefact]):
    """One acquire, with the external data that the daemon asks for.

    A daemon that does not have the libraries proposes alternatives in the fact "instead": send the
    neighbouring libraries ("show"), ask for a claim ("claim", only if `claims`: the caller can
    compile), or ask a daemon that this user runs ("own").
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
        # Only a request that waits for a compile also waits until a daemon is started.
        self.patience = PATIENCE if request["on_miss"] in _PATIENT else 0.0
        self.own = connections.may_start_user_daemon(self.patience)
        self.sources: dict[str, tuple[int, ...]] = {}  # path -> stamp of the file sent last

    def run(self) -> Artefact:
        try:
            return super().run()
        except _NeedsUserDaemon:
            self.own = False
            connection = self.connections.start_user_daemon(self.deadline, self.patience or 0.0)
            if connection is None:
                return super().run()
            # new connections try the user's own daemon first
            self.connections.close()
            return self._with(connection)

    def _exchange(self, connection: Connection) -> Artefact:
        """Sends the request, and then the alternatives that the daemon proposes, if any."""
        while True:
            try:
                return self._send_with_external_data(connection)
            except _errors.Unavailable as error:
                if not self._use_alternative(error):
                    raise

    def _use_alternative(self, error: _errors.Unavailable) -> bool:
        """Changes the request to the first proposed alternative that is possible; returns False if
        there is none.
        """
        for way in error.facts.get("instead", "").split():
            if (
                way == "show"
                and self.runtime is not None
                and (shown := self.runtime.with_neighbours()) is not None
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
                raise _NeedsUserDaemon(error.text, error.hint, error.facts) from error
        return False

    def _send_with_external_data(self, connection: Connection) -> Artefact:
        """Sends the request; sends it again with the external data that the daemon asks for."""
        locations = [self.connections.known_locations(model.stamp) for model in self.models]
        for _ in range(3):
            answer = self._send(connection, locations)
            if isinstance(answer, Artefact):
                answer.connect_seconds = self.connect_seconds
                answer.server = connection.server
                return answer
            for number, more in answer.items():
                locations[number] = more
                self.connections.remember(self.models[number].stamp, more)
        raise _errors.ProtocolError("the daemon asks for more external data in every answer")

    def _finish(self, connection: Connection, result: Artefact) -> None:
        """Keeps the connection for other requests, unless a claim was given on it: the claim ends
        with its connection.
        """
        if result.claimed is None:
            self.connections.give_back(connection)
            return
        from ._claim import Claim  # imported here because it is rarely needed

        result.claim = Claim(self.connections, connection, result.claimed, self.sources)

    def _send(
        self, connection: Connection, locations: list[list[str]]
    ) -> Artefact | dict[int, list[str]]:
        """Returns the answer, or the external data that the daemon asks for: model number to
        locations.
        """
        with self._opened_request(locations) as (body, descriptors):
            connection.start({"acquire": body}, descriptors, self.deadline)
            envelope, received = self._answer(connection)
        try:
            if "need" in envelope:
                return self._requested_locations(envelope["need"])
            reply = envelope.get("acquire_reply")
            if reply is None:
                raise _errors.ProtocolError("unexpected answer of the daemon to Acquire")
            result = artefact(reply, received)
            result.round_trip_seconds = connection.received_at - connection.sent_at
            return result
        finally:
            close_all(received)

    def _requested_locations(self, need: _wire.Message) -> dict[int, list[str]]:
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
    def _opened_request(
        self, locations: list[list[str]]
    ) -> Iterator[tuple[_wire.Message, list[int]]]:
        """Yields the Acquire message and its descriptors, and closes those that it opened."""
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
            "path": _display_path(model.path),
        }


def _display_path(path: str) -> str:
    """Returns the path for display, cut to the protocol's limit."""
    text = display_name(path)
    return text if len(text.encode()) <= 4096 else ""


def _checked_locations(locations: list[str]) -> list[str]:
    """Returns the locations. Raises BadModel for one outside the model's directory, because neither
    the daemon nor the model may make the client open other files.
    """
    for location in locations:
        if not _stays_below(location):
            raise _errors.BadModel(f"external data {location!r} is outside the model's directory")
    if len(locations) > 4096 - 64:
        raise _errors.BadModel(
            f"the model refers to {len(locations)} files of external data, more than {4096 - 64}"
        )
    return locations


def _stays_below(location: str) -> bool:
    """Whether a location is below the model's directory, as it is spelled. "./w", "s//w" and
    "s/../w" are accepted, because ONNX Runtime accepts them.
    """
    depth = 0
    for part in location.split("/"):
        if part in ("", "."):
            continue
        depth += -1 if part == ".." else 1
        if depth < 0:
            return False
    return depth > 0 and not location.startswith("/") and "\0" not in location
