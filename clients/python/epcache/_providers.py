"""Execution providers as ONNX Runtime's own InferenceSession takes them: names in `providers`, with
`provider_options`.

There a name counts that is part of ONNX Runtime itself, and of a plugin nothing is said and nothing
runs on it. Here plugins count as well. As there, names of what is not on this machine are passed
over with a warning as long as something of the list is left.
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
    """Returns what is asked for, in order, each name once as in ONNX Runtime. Raises ValueError
    where the two lists do not fit.
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
                f"providers has {len(names)} names, and provider_options {len(options)} entries"
            )
        if not any(pairs):
            names = list(zip(names, options, strict=True))
    found: dict[str, ExecutionProvider] = {}
    for one in providers(names):
        found.setdefault(one.name, one)
    return list(found.values())


def available(specified: Sequence[ExecutionProvider]) -> tuple[list[Plugin], list[str]]:
    """Returns the execution providers that are there, and what is to be said of those that are not.

    Raises Unavailable where none is there. The CPU at the end is what is left then, and is not
    named else: ONNX Runtime has it in any case.
    """
    found: list[Plugin] = []
    missing: list[str] = []
    for one in specified:
        if found and one is specified[-1] and one.name == CPU and not one.options:
            break
        try:
            found.append(_plugins.plugin(one))
        except _errors.Unavailable as error:
            missing.append(str(error))
    if not found:
        raise _errors.Unavailable("; ".join(missing))
    return found, missing
