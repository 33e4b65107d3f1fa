"""The classes that replace ONNX Runtime's, with the same names and parameters.

A program may import them, subclass them and make options without ever making a session. So this
module imports little; the code for sessions from the cache is imported with the first session.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .. import _session_options
from .._onnxruntime import ort
from . import _report

_COLLECTION = "onnxruntime.capi.onnxruntime_inference_collection"
_LIBRARY = "onnxruntime.capi.onnxruntime_pybind11_state"

_plain_options = ort.SessionOptions


class _AnyOptions(type(ort.SessionOptions)):  # type: ignore[misc]
    """Makes ONNX Runtime's original options instances of SessionOptions, because
    InferenceSession.get_session_options returns them.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or (
            cls is SessionOptions and type(instance) is _plain_options
        )


class SessionOptions(_session_options.SessionOptions, metaclass=_AnyOptions):
    __doc__ = ort.SessionOptions.__doc__
    __slots__ = ()


class InferenceSession(ort.InferenceSession):  # type: ignore[misc]
    __doc__ = ort.InferenceSession.__doc__

    def __init__(
        self,
        path_or_bytes: Any,
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        **kwargs: Any,
    ) -> None:
        _complete()
        super().__init__(path_or_bytes, sess_options, providers, provider_options, **kwargs)


class ModelCompiler(ort.ModelCompiler):  # type: ignore[misc]
    __doc__ = ort.ModelCompiler.__doc__

    def __init__(self, sess_options: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(sess_options, *arguments, **named)
        from . import _compiler

        self._epcache = _compiler.Compile(sess_options, *arguments, **named)

    def compile_to_file(self, output_model_path: Any = None) -> None:
        if not self._epcache.to_file(output_model_path):
            super().compile_to_file(output_model_path)

    def compile_to_bytes(self) -> Any:
        model = self._epcache.to_bytes()
        return super().compile_to_bytes() if model is None else model

    def compile_to_stream(self, write_function: Any) -> None:
        model = self._epcache.to_bytes()
        if model is None:
            super().compile_to_stream(write_function)
        else:
            write_function(model)


for _class, _where in (
    (InferenceSession, _COLLECTION),
    (ModelCompiler, _COLLECTION),
    (SessionOptions, _plain_options.__module__),
):
    _class.__module__ = _where
    _class.__qualname__ = _class.__name__

_completed = False


def _complete() -> None:
    """Makes Served the base class of InferenceSession and so of the program's subclasses. The
    sessions of Served are from the cache.

    If that fails, sessions are ONNX Runtime's. Two threads may do this at once, because a second
    call has the same result.
    """
    global _completed
    if _completed:
        return
    try:
        from ._session import Served
        from ._settings import settings

        settings()  # raises ValueError before anything is replaced
        InferenceSession.__bases__ = (Served,)
    except Exception as error:
        _report.add(
            "failed", why=f"epcache cannot be used in this process: {type(error).__name__}: {error}"
        )
    _completed = True


class _Library(ModuleType):
    """ONNX Runtime's C module for its own Python classes, with the original InferenceSession. The
    program gets the C module with the class that reports.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[_LIBRARY], name)


def watch_library() -> None:
    """Makes sessions be reported that the program creates with ONNX Runtime's C module directly."""
    collection = sys.modules[_COLLECTION]
    if isinstance(collection.__dict__["C"], _Library):
        return
    made: Any = collection.__dict__["C"].InferenceSession

    class _Any(type(made)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, made)

    class Direct(made, metaclass=_Any):  # type: ignore[misc]
        __doc__ = made.__doc__

        def __init__(self, *arguments: Any, **named: Any) -> None:
            _report.add(
                "other",
                what=f"{_LIBRARY}.InferenceSession",
                why="it belongs to ONNX Runtime's C module, which epcachectl run cannot replace",
            )
            super().__init__(*arguments, **named)

    Direct.__module__, Direct.__name__, Direct.__qualname__ = (
        made.__module__,
        made.__name__,
        made.__qualname__,
    )
    own = _Library(_LIBRARY)
    own.__dict__["InferenceSession"] = made
    collection.__dict__["C"] = own
    for place in (_LIBRARY, "onnxruntime.capi._pybind_state"):
        setattr(sys.modules[place], "InferenceSession", Direct)
