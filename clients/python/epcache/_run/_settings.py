"""The options of `epcachectl run` for sessions."""

from __future__ import annotations

import functools

from .._fields import dataclass, field
from .._request import Device, ExecutionProvider, providers
from ._environment import VARIABLE, run_settings


@dataclass(frozen=True)
class Settings:
    """The options; each may be missing in the variable.

    `eps` replace the CPU in programs that request it; without them it stays. `on_miss` is
    InferenceSession's. `verify_output` is Client.acquire's, for sessions with `eps`.
    """

    eps: list[ExecutionProvider] = field(default_factory=list)
    on_miss: str = "wait"
    verify_output: float = 0.0


@functools.cache
def settings() -> Settings:
    """Returns the options as they were at the first call. Raises ValueError if invalid."""
    eps = [_provider(one) for one in run_settings().get("eps", [])]
    return Settings(
        eps,
        str(run_settings().get("on_miss", "wait")),
        float(run_settings().get("verify_output", 0)),
    )


def _provider(one: object) -> ExecutionProvider:
    """Returns the execution provider of a JSON object {"name", "devices": [{"type", "vendor_id",
    "device_id", "metadata"}], "options", "library"}; all but the name may be missing.
    """
    if not isinstance(one, dict):
        raise ValueError(f"{VARIABLE}: {one!r} is not an execution provider")
    [ep] = providers((one.get("name", ""), one.get("options", {})))
    devices = tuple(
        Device(
            d.get("type", ""), d.get("vendor_id", 0), d.get("device_id", 0), d.get("metadata", {})
        )
        for d in one.get("devices", [])
    )
    return ExecutionProvider(ep.name, devices, ep.options, library=str(one.get("library", "")))
