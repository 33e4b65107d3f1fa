"""Compiles for a claim with this process's own libraries, and puts the result.

The compile runs in a worker process if one is installed, so that a crash of the compiler does not
affect the application. It runs in this process for execution providers that are part of the
application's ONNX Runtime, and if there is no worker; then a crash ends the application, as it
would without a cache.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _devices, _errors, _worker
from ._artefact import Artefact, Progress
from ._claim import Claim
from ._fields import dataclass
from ._model import DIRECTORY_ENTRY, ENTRY_FOR_PATHS, before, stamp_of
from ._onnxruntime import ort
from ._plugins import Plugin
from ._record import LEVELS_BY_NAME
from ._refusal import refusal_of


@dataclass(frozen=True)
class Job:
    """A compile. Times are Unix time, 0 if they do not apply."""

    source: str | bytes
    plugins: Sequence[Plugin]
    ort_library: str
    dims: Mapping[str, int]
    dims_by_denotation: Mapping[str, int]
    directory: str  # of external data, if the session options name one; else ""
    embed: bool
    deadline: float  # of time.monotonic()
    progress: Callable[[Progress], None] | None


def run(job: Job, answer: Artefact) -> Artefact:
    """Compiles for the claim, and returns the stored build. On an error it gives the claim up and
    raises the error.
    """
    claim = answer.claim
    assert claim is not None
    with claim, tempfile.TemporaryDirectory(prefix="epcache-claim-") as above:
        directory = os.path.join(above, "out")
        os.mkdir(directory)
        try:
            made = _compile(job, answer, claim, above, os.path.join(directory, claim.output))
            if changed := next(
                (path for path, stamp in claim.sources.items() if stamp_of(path) != stamp), ""
            ):
                raise _errors.BadModel(f"{changed} changed while it was compiled")
        except BaseException as error:
            code = error.facts.get("code", "0") if isinstance(error, _errors.Error) else "0"
            claim.give_up(str(error) or type(error).__name__, int(code))
            raise
        # A put that the daemon refuses ends the claim.
        try:
            return claim.put(
                directory,
                ort_version=made.ort_version,
                made_by=made.versions,
                compile_seconds=made.seconds,
                timeout=job.deadline - time.monotonic(),
                progress=job.progress,
            )
        except _errors.BadRequest as error:
            if not made.logged:
                raise
            # An execution provider that lacks one of its libraries takes no node, and only ONNX
            # Runtime's log has the reason.
            text = f"{error.text}; ONNX Runtime logged: {'; '.join(made.logged)}"
            raise _errors.BadRequest(text, error.hint, error.facts) from error


def _compile(job: Job, answer: Artefact, claim: Claim, above: str, output: str) -> _worker.Result:
    started = time.monotonic()

    def report_phase(phase: str) -> None:
        if job.progress is not None and phase:
            job.progress(Progress("compiling", time.monotonic() - started, phase))

    program = _worker.find()
    if isinstance(job.source, bytes) and claim.sources and before(ort.__version__, ENTRY_FOR_PATHS):
        program = ""  # because the worker loads by path, and would look for external data there
    if program and job.ort_library and all(plugin.library is not None for plugin in job.plugins):
        with contextlib.suppress(_worker.NoWorker):
            model = _path(job, above)
            name = (
                ""
                if claim.sources.keys() - {model}
                else claim.output.removesuffix("_ctx.onnx") + ".onnx"
            )
            request = _request(job, answer, claim, model, output)
            return _worker.compile(
                program, request, min(job.deadline, claim.deadline), report_phase, name
            )
    report_phase("in this process")
    return _in_process(job, answer, claim, output)


def _entries(job: Job, answer: Artefact, claim: Claim) -> dict[str, str]:
    """Returns the session config entries to compile with, including the directory of external data
    if that is not the model's.
    """
    entries = dict(answer.session_options)
    if job.directory or isinstance(job.source, bytes) and claim.sources:
        entries[DIRECTORY_ENTRY] = os.path.abspath(job.directory)
    return entries


def _path(job: Job, above: str) -> str:
    if isinstance(job.source, str):
        return os.path.abspath(job.source)
    path = os.path.join(above, "model.onnx")
    with open(path, "wb") as file:
        file.write(job.source)
    return path


def _request(job: Job, answer: Artefact, claim: Claim, model: str, output: str) -> dict[str, Any]:
    eps = []
    for plugin in job.plugins:
        assert plugin.library is not None
        selectors = [_devices.selector(one, ort.get_ep_devices()) for one in plugin.devices]
        devices = [
            {
                "Type": one.type,
                "VendorID": one.vendor_id,
                "DeviceID": one.device_id,
                "Metadata": dict(one.metadata),
            }
            for one in selectors
            if one is not None  # why_not has the reason otherwise
        ]
        options = plugin.options(_given(plugin, answer))
        eps.append(
            {
                "Name": plugin.ep.name,
                "Library": os.path.abspath(plugin.library.path),
                "Devices": devices,
                "Options": options,
            }
        )
    return {
        "ORTLibrary": job.ort_library,
        "EPs": eps,
        "Model": model,
        "Output": output,
        "Route": claim.route,
        "Embed": job.embed,
        "Options": {
            "Entries": _entries(job, answer, claim),
            "FreeDimensions": dict(job.dims),
            "FreeDimensionsByDenotation": dict(job.dims_by_denotation),
            "GraphOptimizationLevel": answer.graph_optimization_level,
        },
    }


def _given(plugin: Plugin, answer: Artefact) -> dict[str, str]:
    """Returns the provider options to compile with: the daemon's, and those that name a file."""
    return {**answer.provider_options.get(plugin.ep.name, plugin.ep.options), **plugin.ep.files}


def _in_process(job: Job, answer: Artefact, claim: Claim, output: str) -> _worker.Result:
    options = ort.SessionOptions()
    for key, value in _entries(job, answer, claim).items():
        options.add_session_config_entry(key, value)
    for name, size in job.dims.items():
        options.add_free_dimension_override_by_name(name, size)
    for denotation, size in job.dims_by_denotation.items():
        options.add_free_dimension_override_by_denotation(denotation, size)
    for plugin in job.plugins:
        plugin.add_to(options, _given(plugin, answer))
    level = LEVELS_BY_NAME[answer.graph_optimization_level or "disable_all"]
    started = time.monotonic()
    try:
        if claim.route == "session_options":
            _in_session(job, options, level, output)
        else:
            flags = ort.OrtCompileApiFlags.ERROR_IF_OUTPUT_FILE_EXISTS
            ort.ModelCompiler(
                options, job.source, job.embed, flags=flags, graph_optimization_level=level
            ).compile_to_file(output)
    except Exception as error:
        refusal = refusal_of(error)
        raise _errors.CompileFailed(
            refusal.text, facts={"reason": "refused", "code": str(refusal.code or -1)}
        ) from error
    versions = [(p.ep.name, p.version) for p in job.plugins]
    return _worker.Result(ort.__version__, time.monotonic() - started, versions)


def _in_session(job: Job, options: ort.SessionOptions, level: Any, output: str) -> None:
    """Compiles without the compile API: by a session with the option ep.context_enable."""
    for key, value in {
        "enable": "1",
        "file_path": output,
        "embed_mode": str(int(job.embed)),
    }.items():
        options.add_session_config_entry(f"ep.context_{key}", value)
    options.graph_optimization_level = level
    ort.InferenceSession(job.source, options, enable_fallback=0)
