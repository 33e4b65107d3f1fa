"""What `epcachectl run` was told, as it comes in the environment variable EPCACHE_RUN."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass, field

from .._request import Device, ExecutionProvider, providers

VARIABLE = "EPCACHE_RUN"


@dataclass(frozen=True)
class Settings:
    """Every field may be missing in the variable.

    `eps` is what a program that asks for the CPU is sent to; none: it is left on the CPU. `runtime` is a folder with packages
    of ONNX Runtime, which come before the program's own. `on_miss` is InferenceSession's. `verify_output` is Client.acquire's, for
    sessions that are sent.
    """

    eps: list[ExecutionProvider] = field(default_factory=list)
    runtime: str = ""
    on_miss: str = "wait"
    verify_output: float = 0.0


@functools.cache
def settings() -> Settings:
    """Returns what was said when this process began. Raises ValueError for what cannot be understood."""
    said = json.loads(os.environ.get(VARIABLE) or "{}")
    if not isinstance(said, dict):
        raise ValueError(f"{VARIABLE} is no JSON object")
    eps = [_provider(one) for one in said.get("eps", [])]
    return Settings(eps, str(said.get("runtime", "")), str(said.get("on_miss", "wait")), float(said.get("verify_output", 0)))


def _provider(said: object) -> ExecutionProvider:
    """Returns the execution provider of {"name", "devices": [{"type", "metadata"}], "options", "library"}; all but the name may be missing."""
    if not isinstance(said, dict):
        raise ValueError(f"{VARIABLE}: {said!r} is no execution provider")
    [ep] = providers((said.get("name", ""), said.get("options", {})))
    devices = tuple(Device(type=d.get("type", ""), metadata=d.get("metadata", {})) for d in said.get("devices", []))
    return ExecutionProvider(ep.name, devices, ep.options, library=str(said.get("library", "")))
