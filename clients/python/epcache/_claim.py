"""The right to compile a missing build for all waiting requests."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from . import _errors, _wire
from ._artefact import Artefact, Progress, artefact
from ._call import Last
from ._connection import Connection, close_all
from ._connections import Connections
from ._deprecated import renamed_parameter
from ._model import open_regular

MAX_FILES = 64  # of a put
GIVE_UP_LIMIT = 2.0  # seconds
MAX_TEXT = 4096  # bytes of the reason for giving up

T = TypeVar("T")


class Claim:
    """A claim: compile, then `put` the result, or `give_up`. Other requests for the model wait
    until then.

    The claim ends with its own connection: at close(), when this process exits, and at `deadline`,
    a time of time.monotonic(). The graph has to be named `output`. `route` is how to compile it,
    "compile_api" or "session_options"; events and logs name the claim by `id`.
    """

    def __init__(
        self,
        connections: Connections,
        connection: Connection,
        message: _wire.Message,
        sources: dict[str, tuple[int, ...]],
    ) -> None:
        self.id: str = message["id"]
        self.output: str = message["output"]
        self.route: str = message["route"]  # "compile_api" or "session_options"
        self.deadline = time.monotonic() + message["deadline_ms"] / 1000
        # The model's files and their stamps, to notice a file that changes before it is compiled.
        self.sources = sources
        self._connections = connections
        self._connection: Connection | None = connection

    @renamed_parameter("folder", "directory")
    def put(
        self,
        directory: str | os.PathLike[str],
        *,
        ort_version: str = "",
        made_by: Sequence[tuple[str, str]] = (),
        compile_seconds: float = 0.0,
        timeout: float = 600.0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Artefact:
        """Stores the graph with all other files in `directory`, and returns the build that all
        requests get.

        The daemon copies and checks the files; `directory` may be removed afterwards. `made_by` has
        the version of each execution provider. Raises BadRequest or CompileFailed for a result that
        the daemon refuses, which ends the claim, and NoSpace if there is no space after an
        eviction.
        """
        with contextlib.ExitStack() as stack:
            files: list[_wire.Message] = []
            descriptors: list[int] = []
            for name in self._names(os.fspath(directory)):
                descriptors.append(open_regular(os.path.join(directory, name)))
                stack.callback(os.close, descriptors[-1])
                files.append({"name": name, "fd": len(files)})
            message = {
                "claim": self.id,
                "files": files,
                "graphs": 1,
                "compile_seconds": compile_seconds,
                "ort_version": ort_version,
                "made_by": [{"ep": ep, "version": version} for ep, version in made_by],
            }
            deadline = min(time.monotonic() + timeout, self.deadline)
            return self._last(Put(self._connections, message, descriptors, deadline, progress))

    def give_up(self, text: str, code: int = 0) -> None:
        """Ends the claim without a result, so that the next request may compile. `text` is the
        reason, `code` ONNX Runtime's error code, 0 if there is none. Does nothing if the claim has
        ended.
        """
        said = text.encode(errors="replace")[:MAX_TEXT].decode(errors="ignore")
        message = {"claim": self.id, "text": said, "code": code}
        with contextlib.suppress(_errors.Error):
            self._last(GiveUp(self._connections, message, time.monotonic() + GIVE_UP_LIMIT))

    def close(self) -> None:
        """Ends the claim, if it has not ended. May be called again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # at interpreter exit, or after a failed __init__
            pass

    def _names(self, directory: str) -> list[str]:
        """Returns the files below the directory, the graph first."""
        found = []
        for above, _, names in os.walk(directory):
            found += [os.path.relpath(os.path.join(above, name), directory) for name in names]
        if self.output not in found:
            raise FileNotFoundError(
                f"{directory}: no file {self.output}; the graph must have this name"
            )
        found.remove(self.output)
        if len(found) >= MAX_FILES:
            raise ValueError(
                f"{directory}: {len(found)} files beside the graph, at most {MAX_FILES - 1}"
            )
        return [self.output, *sorted(found)]

    def _last(self, call: Last[T]) -> T:
        """Sends the claim's last request. After an error it closes the connection, which ends the
        claim in any case.
        """
        connection, self._connection = self._connection, None
        if connection is None:
            raise _errors.NotFound("the claim has ended")
        try:
            result = call.on(connection)
        except BaseException:
            connection.close()
            raise
        self._connections.give_back(connection)
        return result


class Put(Last[Artefact]):
    def __init__(
        self,
        connections: Connections,
        message: _wire.Message,
        descriptors: list[int],
        deadline: float,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        super().__init__(connections, deadline, progress)
        self.message = message
        self.descriptors = descriptors

    def on(self, connection: Connection) -> Artefact:
        connection.start({"put": self.message}, self.descriptors, self.deadline)
        envelope, received = self._answer(connection)
        try:
            reply = envelope.get("acquire_reply")
            if reply is None:
                raise _errors.ProtocolError("the daemon's answer to a Put is unexpected")
            result = artefact(reply, received)
            result.server = connection.server
            return result
        finally:
            close_all(received)


class GiveUp(Last[None]):
    def __init__(self, connections: Connections, message: _wire.Message, deadline: float) -> None:
        super().__init__(connections, deadline)
        self.message = message

    def on(self, connection: Connection) -> None:
        connection.start({"give_up": self.message}, (), self.deadline)
        envelope, received = self._answer(connection)
        close_all(received)
        if "give_up_reply" not in envelope:
            raise _errors.ProtocolError("the daemon's answer to a GiveUp is unexpected")
