"""What is wanted of the cache: a model with its options and execution providers, as a session has
them.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

from . import _plugins, _providers
from ._artefact import Artefact
from ._client import Client
from ._fields import dataclass, field
from ._onnxruntime import ort
from ._plugins import Plugin
from ._record import Record, resolve_policy
from ._request import EPSpec, ExecutionProvider, providers

Source = Union[str, bytes, "os.PathLike[str]"]


@dataclass
class SessionRequest:
    """A model, and all that decides what it is compiled to in this process."""

    source: Source
    options: ort.SessionOptions | None  # the application's own
    record: Record | None  # what is known of them; None: they cannot be read back
    plugins: list[Plugin]
    more: Mapping[str, Any] = field(default_factory=dict)  # of ONNX Runtime's InferenceSession
    # why it cannot be asked for, of what is said here
    reasons: list[str] = field(default_factory=list)
    # execution providers that were asked for and are not there
    missing: list[str] = field(default_factory=list)
    # `providers` and `provider_options`, where ONNX Runtime is to have them as they are
    given: tuple[Any, Any] | None = None

    def why_not(self, on_miss: str = "wait") -> str:
        """Returns why the cache cannot be asked for it, "" if it can."""
        if self.record is None:
            kind = type(self.options).__name__
            return f"a plain onnxruntime.{kind} cannot be read: use epcache.SessionOptions"
        reasons = self.record.reasons + self.reasons
        # the daemon has no such ONNX Runtime, but this process compiles for it
        if on_miss != "claim":
            reasons += [_built_in(p) for p in self.plugins if p.library is None]
        if self.more.get("disabled_optimizers"):
            reasons.append("disabled_optimizers is given")
        if int(
            self.more.get(
                "read_config_from_model", os.environ.get("ORT_LOAD_CONFIG_FROM_MODEL") == "1"
            )
        ):
            reasons.append("session options are read from the model (read_config_from_model)")
        return "; ".join(reasons)

    def question(self, client: Client, wishes: Mapping[str, Any]) -> Callable[..., Artefact]:
        """Returns what asks for it; it takes, and prefers, what Client.acquire takes."""
        record = self.record
        assert record is not None  # or there is a reason not to ask
        asked: dict[str, Any] = {
            "session_options": record.asked_entries(),
            "dims": record.dims,
            "dims_by_denotation": record.dims_by_denotation,
            "graph_optimization_level": record.compile_level(),
            # Answers that compile nothing are right for equal libraries only if these are shown.
            "runtime": _plugins.runtime(
                self.plugins, beside=wishes.get("on_miss") in ("claim", "fail", "explain")
            ),
        }
        return functools.partial(
            client.acquire, self.source, [p.ep for p in self.plugins], **asked, **wishes
        )

    def add_providers(self, options: ort.SessionOptions) -> None:
        """Adds the execution providers, for the source model. Options of the application's own that
        were given them before have them.
        """
        if options.has_providers():
            return
        for p in self.plugins:
            p.add_to(options, p.ep.options)
        if options is self.options:
            _added[options] = [p.ep for p in self.plugins]


def _built_in(plugin: Plugin) -> str:
    """Says why the daemon cannot compile for it, and what it could."""
    package = _plugins.plugin_package(plugin.ep.name)
    instead = (
        f"; it is served as a plugin: onnxruntime and {package} in the place of this package"
        if package
        else ""
    )
    return f"{plugin.ep.name} is part of ONNX Runtime itself{instead}"


# Plain options cannot be copied, so execution providers are added to the application's own: the
# next session made with them has to know that it was not the application that named them.
_added: weakref.WeakKeyDictionary[Any, list[ExecutionProvider]] = weakref.WeakKeyDictionary()


def session_request(
    source: Source,
    options: ort.SessionOptions | None,
    ep: EPSpec | Sequence[EPSpec] | None,
    names: Sequence[Any] | None = None,
    name_options: Sequence[Mapping[Any, Any]] | None = None,
    **more: Any,
) -> SessionRequest:
    """Returns what is wanted, with its execution providers registered: those of `ep`, of `names`,
    or of the options.

    Raises Unavailable where one, or its device, is not there, and ValueError where none is named,
    or two ways are used.
    """
    record = Record() if options is None else getattr(options, "_record", None)
    result = SessionRequest(source, options, record, [], more)
    before = None if options is None else _added.get(options)
    named = options is not None and options.has_providers() and before is None
    if ep is not None and (named or names):
        raise ValueError(
            "execution providers are named twice: by ep=, and "
            f"{'in the session options' if named else 'by providers='}"
        )
    if ep is not None:
        result.plugins = [_plugins.plugin(one) for one in providers(ep)]
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


def _take_names(
    result: SessionRequest,
    names: Sequence[Any],
    options: Sequence[Mapping[Any, Any]] | None,
    named: bool,
) -> None:
    specifications = _providers.specified(names, options)
    if named:  # ONNX Runtime prefers the names, and says so
        result.given = (names, options)
        result.reasons.append(
            "execution providers are named by providers=, and in the session options as well"
        )
        return
    result.plugins, result.missing = _providers.available(specifications)
    if result.missing and not [p for p in result.plugins if p.ep.name != _providers.CPU]:
        result.reasons += result.missing
        result.missing = []
