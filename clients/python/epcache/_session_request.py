"""The request of a session: a model with its session options and execution providers."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

from . import _errors, _plugins, _providers
from ._artefact import Artefact
from ._client import Client
from ._fields import dataclass, field, replace
from ._model import not_a_model
from ._onnxruntime import ort
from ._plugins import Plugin
from ._record import Record, resolve_policy
from ._request import EPSpec, ExecutionProvider, providers

Source = Union[str, bytes, "os.PathLike[str]"]


@dataclass
class SessionRequest:
    """A model, and everything that determines its compile in this process."""

    source: Source
    options: ort.SessionOptions | None  # the application's
    record: Record | None  # their recorded calls; None for options that do not record
    plugins: list[Plugin]
    more: Mapping[str, Any] = field(default_factory=dict)  # other arguments, for ONNX Runtime
    # why the cache cannot be used, in addition to the record's reasons
    reasons: list[str] = field(default_factory=list)
    # messages about requested execution providers that are missing
    missing: list[str] = field(default_factory=list)
    # `providers` and `provider_options`, for a plain session on providers that are no plugins
    given: tuple[Any, Any] | None = None

    def is_own(self) -> bool:
        """Whether a plain session is that of the program's own `providers`, with ONNX Runtime's
        fallback: none of them is a plugin, so that ONNX Runtime knows them all.
        """
        return self.given is not None and not any(p.library is not None for p in self.plugins)

    def why_not(self, on_miss: str = "wait") -> str:
        """Returns why the cache cannot be used for this request, "" if it can."""
        if self.record is None:
            kind = type(self.options).__name__
            return f"onnxruntime.{kind} cannot be read back: use epcache.SessionOptions"
        reasons = self.record.reasons + self.reasons
        # the daemon does not have this ONNX Runtime, but this process can compile
        if on_miss != "claim":
            reasons += [_built_in(p) for p in self.plugins if p.library is None]
        if self.more.get("disabled_optimizers"):
            reasons.append("the cache does not support disabled_optimizers")
        if int(
            self.more.get(
                "read_config_from_model", os.environ.get("ORT_LOAD_CONFIG_FROM_MODEL") == "1"
            )
        ):
            reasons.append("the cache does not support read_config_from_model")
        return "; ".join(reasons)

    def question(self, client: Client, wishes: Mapping[str, Any]) -> Callable[..., Artefact]:
        """Returns Client.acquire with this request's arguments; further arguments override them."""
        record = self.record
        assert record is not None  # otherwise why_not has a reason
        asked: dict[str, Any] = {
            "session_options": record.asked_entries(),
            "dims": record.dims,
            "dims_by_denotation": record.dims_by_denotation,
            "graph_optimization_level": record.compile_level(),
            # Without a compile the daemon can find a build for equal libraries only by their files.
            "runtime": _plugins.runtime(
                self.plugins, beside=wishes.get("on_miss") in ("claim", "fail", "explain")
            ),
        }
        return functools.partial(
            client.acquire,
            self.source,
            # the library is in the runtime
            [replace(p.ep, library="") for p in self.plugins],
            **asked,
            **wishes,
        )

    def add_providers(self, options: ort.SessionOptions) -> None:
        """Adds the execution providers to options for the source model, unless an earlier session
        has added them.
        """
        if _has_providers(options):
            return
        for p in self.plugins:
            p.add_to(options, p.given)
        if options is self.options:
            _added[options] = [p.ep for p in self.plugins]


def _has_providers(options: ort.SessionOptions) -> bool:
    return hasattr(options, "has_providers") and options.has_providers()


def _built_in(plugin: Plugin) -> str:
    """Returns why the daemon cannot compile for it, and the alternative, if any."""
    package = _plugins.plugin_package(plugin.ep.name)
    instead = f"; install onnxruntime and {package} instead of this package" if package else ""
    return (
        f"{plugin.ep.name} is built into this ONNX Runtime, and the daemon compiles only for "
        f"plugins{instead}"
    )


# The execution providers that a session added to the application's plain options, which cannot be
# copied. So the next session with them knows that the application did not add them.
_added: weakref.WeakKeyDictionary[Any, list[ExecutionProvider]] = weakref.WeakKeyDictionary()


def session_request(
    source: Source,
    options: ort.SessionOptions | None,
    ep: EPSpec | Sequence[EPSpec] | None,
    names: Sequence[Any] | None = None,
    name_options: Sequence[Mapping[Any, Any]] | None = None,
    **more: Any,
) -> SessionRequest:
    """Returns the request, and registers its execution providers: those of `ep`, of `names`, or of
    the options.

    Raises Unavailable if one, or the device that it names, is missing, and ValueError if none is
    named, or they are named in two ways.
    """
    if not isinstance(source, (str, bytes, os.PathLike)):
        raise not_a_model(source)
    record = Record() if options is None else getattr(options, "_record", None)
    result = SessionRequest(source, options, record, [], more)
    before = None if options is None else _added.get(options)
    named = options is not None and _has_providers(options) and before is None
    if ep is not None and (named or names):
        raise ValueError(
            "execution providers are named twice: by ep=, and "
            f"{'in the session options' if named else 'by providers='}"
        )
    if ep is not None and name_options:
        raise ValueError(
            "provider_options= belongs to providers=; beside ep= write the options into it: "
            f"ep={_with_options(ep, name_options)}"
        )
    if ep is not None:
        _take_eps(result, providers(ep))
    elif names:
        _take_names(result, names, name_options, named)
    elif name_options:
        raise ValueError("provider_options are given without providers")
    elif named:
        if record is not None:
            resolve_policy(record)
        recorded: list[tuple[ExecutionProvider, Any]] = (
            record.providers if record is not None else []
        )
        result.plugins = [_plugins.plugin(one, devices) for one, devices in recorded]
    else:
        raise ValueError(
            "no execution provider named; for example ep='OpenVINOExecutionProvider:CPU'"
        )
    if before not in (None, [p.ep for p in result.plugins]):
        raise ValueError(
            "these session options were used for other execution providers before: use "
            "epcache.SessionOptions"
        )
    return result


def _with_options(
    ep: EPSpec | Sequence[EPSpec], options: Sequence[Mapping[Any, Any]] | Mapping[Any, Any]
) -> str:
    """Returns the form of `ep` with these options, as a program writes it."""
    given = [options] if isinstance(options, Mapping) else list(options)
    names = [one.name + (":" + one.devices[0].type if one.devices else "") for one in providers(ep)]
    pairs = [
        repr((name, {str(key): value for key, value in more.items()}))
        for name, more in zip(names, given, strict=False)
    ]
    return pairs[0] if len(pairs) == 1 and len(names) == 1 else f"[{', '.join(pairs)}]"


def _take_eps(result: SessionRequest, specified: Sequence[ExecutionProvider]) -> None:
    """Adds the execution providers. One that cannot have a device on this machine is left out, as
    ONNX Runtime would do; if all are, the session is a plain one on the CPU.
    """
    for one in specified:
        try:
            result.plugins.append(_plugins.plugin(one))
        except _errors.Unavailable as error:
            if error.facts.get("devices") != "0":
                raise
            result.missing.append(str(error))
    if not result.plugins:
        result.reasons, result.missing = result.reasons + result.missing, []


def _take_names(
    result: SessionRequest,
    names: Sequence[Any],
    options: Sequence[Mapping[Any, Any]] | None,
    named: bool,
) -> None:
    specifications = _providers.specified(names, options)
    result.given = (names, options)
    if named:  # ONNX Runtime uses the names, with a warning
        result.reasons.append(
            "execution providers are named by providers=, and in the session options as well"
        )
        return
    result.plugins, result.missing = _providers.available(specifications)
    if result.missing and not [p for p in result.plugins if p.ep.name != _providers.CPU]:
        result.reasons += result.missing
        result.missing = []
