"""Execution providers in the form of ONNX Runtime's InferenceSession: names in `providers`, with
`provider_options`.

ONNX Runtime itself accepts only built-in providers there, and ignores plugins silently; here
plugins work, too. As in ONNX Runtime, providers that are missing on this machine are skipped with a
warning. If no plugin is left, ONNX Runtime gets the list itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import _errors, _plugins
from ._plugins import Plugin
from ._request import ExecutionProvider, providers

CPU = "CPUExecutionProvider"


def specified(
    names: Sequence[Any], options: Sequence[Mapping[Any, Any]] | None
) -> list[ExecutionProvider]:
    """Returns the named execution providers in order, each once, as in ONNX Runtime. Raises
    ValueError if the two lists have different lengths.
    """
    if isinstance(names, str):
        raise ValueError(f"providers must be a list of names, not the text {names!r}")
    pairs = [isinstance(one, tuple) for one in names]
    if options:
        if any(pairs) and any(options):
            raise ValueError(
                "provider options are given twice: in providers, and by provider_options="
            )
        if len(options) != len(names):
            raise ValueError(
                f"providers has {len(names)} names, but provider_options {len(options)} entries"
            )
        if not any(pairs):
            names = list(zip(names, options, strict=True))
    found: dict[str, ExecutionProvider] = {}
    for one in providers(names):
        found.setdefault(one.name, one)
    return list(found.values())


def available(specified: Sequence[ExecutionProvider]) -> tuple[list[Plugin], list[str]]:
    """Returns the available execution providers, and a message for each missing one.

    Raises Unavailable if there is none, and a plugin is installed but does not have the device, or
    cannot be loaded. The CPU at the end of the list is ignored after another provider, because ONNX
    Runtime always adds it.
    """
    found: list[Plugin] = []
    missing: list[str] = []
    wrong: _errors.Unavailable | None = None
    for one in specified:
        if found and one is specified[-1] and one.name == CPU and not one.options:
            break
        try:
            found.append(_plugins.plugin(one))
        except _errors.Unavailable as error:
            missing.append(str(error))
            if "missing_library" not in error.facts and error.facts.get("devices") != "0":
                wrong = wrong or error
    if wrong is not None and not found:
        raise wrong
    return found, missing
