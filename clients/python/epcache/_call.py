"""One request to the daemon, over as many connections and rounds as it takes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from . import _errors, _wire
from ._artefact import Artefact, Progress, artefact, progress
from ._autostart import PATIENCE
from ._connection import Connection, Lost, close_all
from ._messages import ENUMS
from ._model import Model, stamp_of
from ._request import ExecutionProvider, Runtime, Send
from ._version import __version__

if TYPE_CHECKING:
    from ._client import Client

SILENCE = 5.0  # after that long without a word it is asked on another connection whether it still lives
SIGN_OF_LIFE = 2.0

_PATIENT = [ENUMS["OnMiss"][name] for name in ("WAIT", "REFRESH", "CLAIM", "KEY_ONLY", "EXPLAIN")]

T = TypeVar("T")


class Call(Generic[T]):
    """A request that may be sent again when the daemon goes away."""

    patience: float | None = None  # for a daemon that has to be started, in seconds; None: it is not worth one

    def __init__(
        self, client: Client, deadline: float, progress: Callable[[Progress], None] | None = None
    ) -> None:
        self.client = client
        self.deadline = deadline
        self.progress = progress
        self.connect_seconds = 0.0

    def run(self) -> T:
        connection = self.client._take()
        if connection is not None:
            with contextlib.suppress(Lost):
                return self._with(connection)
            # An idle connection may have died with an earlier daemon: that says nothing of the one that is there now.
        connection = self._dial()
        try:
            return self._with(connection)
        except Lost as error:
            # The daemon was there and went away: it may be restarting. Asking again does no harm, and only once: it
            # may be this very request that it dies of.
            return self._with(self._dial_again(error))

    def _dial_again(self, lost: Lost) -> Connection:
        until = min(self.deadline, time.monotonic() + self.client._restart_limit)
        pause = 0.01
        tried = self.client._restart_limit <= 0
        while not tried or time.monotonic() < until:  # once in any case: this process itself may have been held up
            tried = True
            with contextlib.suppress(_errors.NoDaemon):
                return self._dial()
            time.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(2 * pause, 0.25)
        raise _errors.NoDaemon(f"the daemon went away during the request and did not come back: {lost.text}") from lost

    def _dial(self) -> Connection:
        started = time.monotonic()
        connection = self.client._connect(self.deadline, self.patience)
        self.connect_seconds = time.monotonic() - started
        return connection

    def _with(self, connection: Connection) -> T:
        try:
            result = self._rounds(connection)
        except (Lost, _errors.ProtocolError, _errors.DeadlineExceeded):
            connection.close()
            raise
        except _errors.Error:
            # The daemon's own answer: the connection is as good as before.
            self.client._give_back(connection)
            raise
        except BaseException:
            # Of the caller's making, in the middle of a request: closing is what cancels it.
            connection.close()
            raise
        self._done(connection, result)
        return result

    def _done(self, connection: Connection, result: T) -> None:
        self.client._give_back(connection)

    def _rounds(self, connection: Connection) -> T:
        raise NotImplementedError

    def _answer(self, connection: Connection) -> tuple[_wire.Message, list[int]]:
        """Waits for what is not Progress. A daemon that is silent for long is asked whether it still lives."""
        while True:
            limit = min(self.deadline, time.monotonic() + SILENCE)
            if not connection.readable(limit):
                self._check_alive(connection)
                continue
            envelope, descriptors = connection.answer(self.deadline)
            if "progress" not in envelope:
                return envelope, descriptors
            close_all(descriptors)
            if self.progress is not None:
                self.progress(progress(envelope["progress"]))

    def _check_alive(self, connection: Connection) -> None:
        if time.monotonic() >= self.deadline:
            raise _errors.DeadlineExceeded(f"{connection.path}: no answer in time")
        limit = min(self.deadline, time.monotonic() + SIGN_OF_LIFE)
        try:
            Connection(connection.path, limit, f"python epcache {__version__}").close()
        except _errors.Error as error:
            raise Lost(f"{connection.path}: the daemon no longer answers: {error.text}") from error


class Question(Call[_wire.Message]):
    """A request without descriptors, by the names of its body and of its answer's."""

    def __init__(
        self,
        client: Client,
        body: str,
        message: _wire.Message,
        reply: str,
        deadline: float,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        super().__init__(client, deadline, progress)
        self.body = body
        self.message = message
        self.reply = reply

    def _rounds(self, connection: Connection) -> _wire.Message:
        connection.start({self.body: self.message}, (), self.deadline)
        envelope, received = self._answer(connection)
        close_all(received)
        reply: _wire.Message | None = envelope.get(self.reply)
        if reply is None:
            raise _errors.ProtocolError(f"the daemon's answer to {self.body} is something else")
        return reply


class _OwnDaemon(_errors.Unavailable):
    """The daemon has no such libraries, and one of the user's own may run them."""


class Acquire(Call[Artefact]):
    """One acquire, with the external data that the daemon asks for.

    A daemon that does not have the libraries says what can be asked instead (the fact "instead"): with all libraries
    shown, for a claim, if `claims` says that the caller can compile, or of a daemon of the user's own.
    """

    def __init__(
        self,
        client: Client,
        models: list[Model],
        eps: list[ExecutionProvider],
        runtime: Runtime | None,
        request: _wire.Message,
        deadline: float,
        progress: Callable[[Progress], None] | None,
        claims: bool = False,
    ) -> None:
        super().__init__(client, deadline, progress)
        self.models = models  # more than one: a group
        self.eps = eps
        self.runtime = client._shown(runtime)
        self.claims = claims
        self.request = request
        # Who waits for a compile waits for who does it; others only as long as for a daemon that is there.
        self.patience = PATIENCE if request["on_miss"] in _PATIENT else 0.0
        self.own = client._may_start_own(self.patience)
        self.sources: dict[str, tuple[int, ...]] = {}  # path -> stamp of what was sent last

    def run(self) -> Artefact:
        try:
            return super().run()
        except _OwnDaemon:
            self.own = False
            connection = self.client._start_own(self.deadline, self.patience or 0.0)
            if connection is None:
                return super().run()
            self.client.close()  # the user's own daemon is asked first from now on, by each new connection
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
        """Turns the request into the first that the daemon proposes instead and that can be asked; False where there is none."""
        for way in error.facts.get("instead", "").split():
            if way == "show" and self.runtime is not None and (shown := self.runtime.showing()) is not None:
                self.runtime = shown
                self.client._show(shown)
                return True
            if way == "claim" and self.claims and self.request["on_miss"] == ENUMS["OnMiss"]["WAIT"]:
                self.request = {**self.request, "on_miss": ENUMS["OnMiss"]["CLAIM"]}
                return True
            if way == "own" and self.own:
                raise _OwnDaemon(error.text, error.hint, error.facts) from error
        return False

    def _located(self, connection: Connection) -> Artefact:
        """Asks, and once more with the external data that the daemon said the model refers to."""
        locations = [self.client._known_locations(model.stamp) for model in self.models]
        for _ in range(3):
            answer = self._ask(connection, locations)
            if isinstance(answer, Artefact):
                answer.connect_seconds = self.connect_seconds
                answer.server = connection.server
                return answer
            for number, more in answer.items():
                locations[number] = more
                self.client._remember(self.models[number].stamp, more)
        raise _errors.ProtocolError("the daemon asks for external data again and again")

    def _done(self, connection: Connection, result: Artefact) -> None:
        """A claim hangs on the connection that it was given on, which is no other request's from then on."""
        if result.claimed is None:
            self.client._give_back(connection)
            return
        from ._claim import Claim  # which is made of calls itself

        result.claim = Claim(self.client, connection, result.claimed, self.sources)

    def _ask(self, connection: Connection, locations: list[list[str]]) -> Artefact | dict[int, list[str]]:
        """Returns the answer, or the locations that the daemon asks for, by the number of the model."""
        with self._opened(locations) as (body, descriptors):
            connection.start({"acquire": body}, descriptors, self.deadline)
            envelope, received = self._answer(connection)
        try:
            if "need" in envelope:
                return self._needed(envelope["need"])
            reply = envelope.get("acquire_reply")
            if reply is None:
                raise _errors.ProtocolError("the daemon's answer to an Acquire is something else")
            result = artefact(reply, received)
            result.round_trip_seconds = connection.received_at - connection.sent_at
            return result
        finally:
            close_all(received)

    def _needed(self, need: _wire.Message) -> dict[int, list[str]]:
        locations = _checked_locations(need["locations"])
        members = need["members"] or [0] * len(locations)
        if len(members) != len(locations) or any(member >= len(self.models) for member in members):
            raise _errors.ProtocolError("the daemon asks for external data of models that it was not given")
        wanted: dict[int, list[str]] = {}
        for member, location in zip(members, locations, strict=True):
            wanted.setdefault(member, []).append(location)
        return wanted

    @contextlib.contextmanager
    def _opened(self, locations: list[list[str]]) -> Iterator[tuple[_wire.Message, list[int]]]:
        """Yields the Acquire and its descriptors; those that were opened for it are closed afterwards."""
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

    def _model_message(self, model: Model, locations: list[str], send: Send, stack: contextlib.ExitStack) -> _wire.Message:
        number = send(model.fd)
        if model.path:
            self.sources[model.path] = stamp_of(model.fd)
        external = []
        for location in locations:
            descriptor = model.open_external(location)
            stack.callback(os.close, descriptor)
            if model.folder and model.external is None:
                self.sources[os.path.join(model.folder, location)] = stamp_of(descriptor)
            external.append({"location": location, "fd": send(descriptor)})
        return {"fd": number, "name": model.name, "external": external}


def _checked_locations(locations: list[str]) -> list[str]:
    """A client opens only what lies below the model's folder, whatever the daemon, or the model, asks for."""
    for location in locations:
        if not _stays_below(location):
            raise _errors.BadModel(f"external data {location!r} does not lie below the model's folder")
    if len(locations) > 4096 - 64:
        raise _errors.BadModel(f"the model refers to {len(locations)} files of external data: too many")
    return locations


def _stays_below(location: str) -> bool:
    """Whether external data lies below the model's folder by its spelling. ONNX Runtime opens "./w", "s//w" and "s/../w"."""
    depth = 0
    for part in location.split("/"):
        if part in ("", "."):
            continue
        depth += -1 if part == ".." else 1
        if depth < 0:
            return False
    return depth > 0 and not location.startswith("/") and "\0" not in location
