"""Uses of the cache without a session: why, warm, compile.

Each has the parameters of InferenceSession, and sends the request that a session would send.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import _errors
from ._artefact import Artefact
from ._client import Client
from ._compiled_copy import Compiled, copy_artefact
from ._deprecated import renamed_parameter
from ._explanation import Explanation
from ._fields import dataclass
from ._model import display_name
from ._onnxruntime import ort
from ._request import EPSpec, Output
from ._session import shared_client
from ._progress_display import Progressing, model_name, displayed
from ._session_request import Source, SessionRequest, session_request

Names = Sequence[Any]
NameOptions = Sequence[Mapping[Any, Any]]


def why(
    model: Source,
    sess_options: ort.SessionOptions | None = None,
    providers: Names | None = None,
    provider_options: NameOptions | None = None,
    *,
    ep: EPSpec | Sequence[EPSpec] | None = None,
    client: Client | None = None,
    embed: bool = False,
    output: Output | None = None,
) -> Explanation:
    """Returns what the daemon would do for a session of this model, and why. Nothing is compiled.

        print(epcache.why("model.onnx", ep="OpenVINOExecutionProvider:CPU").reason)

    If a session would not ask the daemon, the decision is "bypassed", with the reason. Raises an
    epcache.Error: NoDaemon if no daemon answers, Unavailable if the execution provider is missing.
    """
    one = session_request(model, sess_options, ep, providers, provider_options)
    if reason := one.why_not():
        return Explanation("bypassed", reason, "", "", "", [], [], [])
    ask = one.question(
        client or shared_client(), {"embed": embed, "output": output, "on_miss": "explain"}
    )
    with ask() as answer:
        if answer.explanation is None:
            raise _errors.ProtocolError("the daemon sent no explanation")
        return answer.explanation


@dataclass(frozen=True)
class Warmed:
    """The result of warm for one model.

    `outcome` is "hit", "background" (it is being compiled), "compiled", "bypassed" or "failed".
    """

    model: str  # the path as passed; "model" for bytes
    outcome: str
    why: str = ""  # the reason for the outcome
    job: str = ""  # of "background": the compile, for Client.follow

    @property
    def ready(self) -> bool:
        """Whether a session would come from the cache now."""
        return self.outcome in ("hit", "compiled")


def warm(
    models: Source | Sequence[Source],
    sess_options: ort.SessionOptions | None = None,
    providers: Names | None = None,
    provider_options: NameOptions | None = None,
    *,
    ep: EPSpec | Sequence[EPSpec] | None = None,
    client: Client | None = None,
    embed: bool = False,
    output: Output | None = None,
    store: str = "",
    wait: bool = False,
    timeout: float | None = None,
    progress: Progressing = None,
) -> list[Warmed]:
    """Compiles models in the background, so that later sessions are hits. Use it in installers or
    when the application is idle.

        epcache.warm(["det.onnx", "rec.onnx"], options, ep="OpenVINOExecutionProvider:CPU")

    The compiles continue after this process has exited. With `wait` this returns when they have
    ended, or after `timeout` seconds, by default the client's. A failure of one model is in its
    `why` and does not affect the others. Raises NoDaemon if no daemon answers, Unavailable if the
    execution provider is missing.
    """
    if progress and not wait:
        raise ValueError("progress= needs wait=True: otherwise warm returns before the compiles")
    asked = client or shared_client()
    until = time.monotonic() + (asked._timeout if timeout is None else timeout)
    wishes = {
        "on_miss": "background",
        "keep_going": True,
        "embed": embed,
        "output": output,
        "store": store,
    }
    sources: Sequence[Source] = (
        [models] if models is None or isinstance(models, (str, bytes, os.PathLike)) else models
    )
    found: list[tuple[Warmed, SessionRequest]] = []
    for source, one in [
        (source, session_request(source, sess_options, ep, providers, provider_options))
        for source in sources
    ]:
        found.append((_request_warm(asked, source, one, wishes, until, _jobs(found)), one))
    if not wait:
        return [warmed for warmed, _ in found]
    return [_wait_for_warmed(asked, *pair, wishes, until, progress) for pair in found]


def _jobs(found: Sequence[tuple[Warmed, SessionRequest]]) -> Iterator[str]:
    return (warmed.job for warmed, _ in found if warmed.job)


def _request_warm(
    client: Client,
    source: Source,
    one: SessionRequest,
    wishes: Mapping[str, Any],
    until: float,
    before: Iterator[str],
) -> Warmed:
    """Requests one model. If the daemon is busy, waits for one of the compiles `before` and
    retries.
    """
    name = "model" if isinstance(source, bytes) else display_name(os.fspath(source))
    if reason := one.why_not("background"):
        return Warmed(name, "bypassed", reason)
    while True:
        try:
            with one.question(client, wishes)(timeout=max(0.0, until - time.monotonic())) as answer:
                return Warmed(name, answer.outcome, answer.why, answer.job)
        except _errors.NoDaemon:
            raise
        except _errors.Busy as error:
            job = next(before, "")
            if not job or time.monotonic() >= until:
                return Warmed(name, "failed", str(error))
            _wait_for_job(client, job, until, None)
        except (_errors.Error, OSError) as error:
            return Warmed(name, "failed", str(error))


def _wait_for_warmed(
    client: Client,
    warmed: Warmed,
    one: SessionRequest,
    wishes: Mapping[str, Any],
    until: float,
    progress: Progressing,
) -> Warmed:
    if not warmed.job:
        return warmed
    with displayed(progress, model_name(warmed.model)) as step:
        state, text = _wait_for_job(client, warmed.job, until, step)
    if state == "gone":  # the daemon no longer has the job: look the build up
        return _request_warm(
            client, one.source, one, {**wishes, "on_miss": "fail"}, until, iter(())
        )
    if state == "done":
        return Warmed(warmed.model, "compiled", warmed.why)
    if state:
        return Warmed(warmed.model, "failed", text)
    return Warmed(warmed.model, warmed.outcome, text, warmed.job)


def _wait_for_job(
    client: Client, job: str, until: float, step: Callable[..., None] | None
) -> tuple[str, str]:
    """Waits for the end of a compile; returns its state, "" if it has not ended, and a text for the
    user.
    """
    try:
        ended = client.follow(job, timeout=max(0.0, until - time.monotonic()), progress=step)
    except _errors.DeadlineExceeded as error:
        return "", str(error)
    except _errors.NotFound as error:
        return "gone", str(error)  # it ended so long ago that the daemon has forgotten it
    return ended.state, str(ended.error or ended.state)


@renamed_parameter("folder", "directory")
def compile(
    model: Source,
    directory: str | os.PathLike[str],
    sess_options: ort.SessionOptions | None = None,
    providers: Names | None = None,
    provider_options: NameOptions | None = None,
    *,
    ep: EPSpec | Sequence[EPSpec] | None = None,
    client: Client | None = None,
    on_miss: str = "wait",
    embed: bool = False,
    output: Output | None = None,
    store: str = "",
    overwrite: bool = False,
    name: str = "",
    timeout: float | None = None,
    progress: Progressing = None,
) -> Compiled:
    """Writes a copy of the compiled model into a directory, from the cache or after a compile.

        ep = "OpenVINOExecutionProvider:CPU"
        made = epcache.compile("model.onnx", "compiled/", options, ep=ep)
        made.path                       # compiled/0123456789abcdef_ctx.onnx

    With `name` the graph gets this file name, and its binary the name that ONNX Runtime would use
    beside it. The copy needs no daemon and no lease. Load it with the options of the result;
    nothing reports when it becomes stale. `on_miss` is wait, fail or refresh. Raises
    FileExistsError if a file exists with other content, unless `overwrite`; Unavailable, with the
    reason, if the cache cannot serve this request; and the errors of Client.acquire.
    """
    if on_miss not in ("wait", "fail", "refresh"):
        raise ValueError(
            f"on_miss {on_miss!r}: must be wait, fail or refresh to write a compiled model"
        )
    if name and os.path.basename(name) != name:
        raise ValueError(f"name {name!r}: a file name, because directory= has the place")
    one = session_request(model, sess_options, ep, providers, provider_options)
    if reason := one.why_not(on_miss):
        raise _errors.Unavailable(f"the cache cannot be used: {reason}")
    wishes: dict[str, Any] = {"on_miss": on_miss, "embed": embed, "output": output, "store": store}
    with displayed(progress, model_name(model)) as step:
        answer: Artefact = one.question(client or shared_client(), wishes)(
            timeout=timeout, progress=step
        )
    with answer:
        if answer.fd is None:
            raise _errors.BadModel(
                "there is no compiled model to write, because the daemon answered "
                f"{answer.outcome}: {answer.why}"
            )
        return copy_artefact(answer, os.fspath(directory), overwrite, name)
