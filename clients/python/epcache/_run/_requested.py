"""The execution providers that a program requests, and those that it gets from `epcachectl run`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .. import _errors, _plugins
from .._fields import dataclass, field, replace
from .._onnxruntime import ort
from .._request import Device, ExecutionProvider, option_text
from ._settings import settings

CPU = "CPUExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
# Providers in every onnxruntime that do not compile. A program that names no other one requests the
# CPU.
_UNCOMPILED = frozenset((CPU, "AzureExecutionProvider"))
# The option of the built-in OpenVINO provider that is a device of the plugin.
_DEVICE_OPTION = "device_type"


@dataclass(frozen=True)
class RequestedSession:
    """The execution providers for a session.

    `names` are those that the program requests. `eps` are those to use; none if the session options
    name devices. `sent` is whether the program requests the CPU, and `eps` are those of --ep. `why`
    is the reason why the session is not made by epcache, or "".
    """

    names: list[str]
    eps: list[ExecutionProvider] = field(default_factory=list)
    sent: bool = False
    why: str = ""


def requested_session(options: Any, providers: Any, provider_options: Any) -> RequestedSession:
    """Interprets the arguments of ONNX Runtime's InferenceSession. With arguments that it cannot
    interpret, the session is made by ONNX Runtime.
    """
    named = _named(providers, provider_options)
    if named is None:
        return RequestedSession(
            [], why="the argument providers has a form that ONNX Runtime does not accept"
        )
    names = [name for name, _ in named]
    if options is not None and options.has_providers():
        if named:
            return RequestedSession(
                names,
                why="execution providers are named both in the session options and as providers",
            )
        return RequestedSession([])
    if options is not None and getattr(options, "_record", None) is None:
        return RequestedSession(
            names or [CPU],
            why="the session options were made by ONNX Runtime itself, and cannot be read back",
        )
    built_in = [
        name for name in names if name in ort.get_available_providers() and name not in _UNCOMPILED
    ]
    if built_in:
        return RequestedSession(
            names, why=f"it asks for {built_in[0]}, which is part of the program's own ONNX Runtime"
        )
    plugins, missing = _plugins_of(named)
    if plugins:
        return RequestedSession(names, plugins)
    if not settings().eps:
        return RequestedSession(
            names or [CPU], why=missing or f"it asks for {CPU}, and no --ep was given"
        )
    return RequestedSession(
        names or [CPU], [_in_single_precision(ep) for ep in settings().eps], sent=True
    )


def _named(providers: Any, provider_options: Any) -> list[tuple[str, Mapping[str, Any]]] | None:
    """Returns names with options, in order; None for arguments that ONNX Runtime would refuse."""
    if providers is None:
        return []
    try:
        if provider_options is not None:
            pairs = list(zip(providers, provider_options, strict=True))
        else:
            pairs = [(one, {}) if isinstance(one, str) else (one[0], one[1]) for one in providers]
    except (TypeError, ValueError, IndexError):
        return None
    if not all(isinstance(name, str) and isinstance(options, Mapping) for name, options in pairs):
        return None
    return pairs


def _plugins_of(named: list[tuple[str, Mapping[str, Any]]]) -> tuple[list[ExecutionProvider], str]:
    """Returns the providers that are available here as plugins, and why others are not."""
    found, missing = [], ""
    for name, options in named:
        if name in _UNCOMPILED:
            continue
        ep = _with_device(
            ExecutionProvider(name, options={str(k): option_text(v) for k, v in options.items()})
        )
        try:
            if _is_plugin(name):
                _plugins.plugin(ep)
                found.append(ep)
        except _errors.Unavailable as error:
            missing = missing or f"it asks for {name}: {error}"
    return found, missing


def _is_plugin(name: str) -> bool:
    """Whether the name may be a plugin's: its package is known, or the program registered it."""
    family = name.partition(".")[0]
    return family in _plugins._PACKAGES or any(
        device.ep_name == name for device in _plugins.listed_devices()
    )


def _with_device(ep: ExecutionProvider) -> ExecutionProvider:
    device = ep.options.get(_DEVICE_OPTION, "")
    if ep.name != OPENVINO or device not in ("CPU", "GPU", "NPU"):
        return ep
    options = {key: value for key, value in ep.options.items() if key != _DEVICE_OPTION}
    return replace(ep, devices=(Device(type=device),), options=options)


def _in_single_precision(ep: ExecutionProvider) -> ExecutionProvider:
    """Returns the execution provider with single precision, unless the user chose a precision.

    A program that requests the CPU expects results in single precision, but OpenVINO uses half
    precision if the hardware prefers it. NPUs cannot choose.
    """
    if ep.name != OPENVINO or "load_config" in ep.options:
        return ep
    try:
        devices = _plugins.plugin(ep).devices
    except _errors.Unavailable:
        return ep  # the session raises the same error and reports it
    # One that is built into ONNX Runtime lists no device.
    device = devices[0].device.type.name if devices else ""
    if device not in ("CPU", "GPU"):
        return ep
    config = json.dumps({device: {"INFERENCE_PRECISION_HINT": "f32"}})
    return replace(ep, options={**ep.options, "load_config": config})
