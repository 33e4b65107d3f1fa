"""Compiles that a program requests from ModelCompiler, from the cache if possible."""

from __future__ import annotations

import os
import time
from typing import Any

from .. import _errors
from .._artefact import Artefact
from .._compiled_copy import copy_artefact
from .._onnxruntime import ort
from .._record import LEVELS
from .._session import shared_client
from .._session_request import SessionRequest, session_request
from . import _report
from ._session import _after_fork_reason, _error_text, _name
from ._settings import settings


class Compile:
    """The arguments of a ModelCompiler. Its methods report each compile, and return a result that
    says whether the cache had it; otherwise ONNX Runtime compiles.
    """

    def __init__(
        self,
        sess_options: Any,
        input_model_path_or_bytes: Any,
        embed_compiled_data_into_model: bool = False,
        external_initializers_file_path: Any = None,
        external_initializers_size_threshold: int = 1024,
        flags: Any = 0,
        graph_optimization_level: Any = ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
        get_initializer_location_func: Any = None,
        **others: Any,
    ) -> None:
        self._model, self._embed = input_model_path_or_bytes, bool(embed_compiled_data_into_model)
        self._level = LEVELS.get(graph_optimization_level, "")
        self._names: list[str] = []
        self._wanted: SessionRequest | None = None
        known = ort.OrtCompileApiFlags
        self._keeps_files = bool(int(flags) & int(known.ERROR_IF_OUTPUT_FILE_EXISTS))
        other = int(flags) & ~int(known.ERROR_IF_OUTPUT_FILE_EXISTS)
        unknown = [name for name, given in others.items() if given is not None]
        if external_initializers_file_path:
            unknown.append("external_initializers_file_path")
        if get_initializer_location_func is not None:
            unknown.append("get_initializer_location_func")
        if other & ~int(known.ERROR_IF_NO_NODES_COMPILED):
            unknown.append("flags")
        if not self._level:
            unknown.append("graph_optimization_level")
        self._why = _after_fork_reason()
        if unknown:
            self._why = f"epcache does not support ModelCompiler's {', '.join(unknown)}"
        if not self._why:
            self._why = self._interpret(sess_options)

    def _interpret(self, options: Any) -> str:
        """Makes the request, as the options are now. Returns why that is not possible, or ""."""
        try:
            if getattr(options, "_record", None) is None:
                return "the session options were made by ONNX Runtime itself"
            if not options.has_providers():
                return "the session options name no device"
            settings()  # raises ValueError
            self._wanted = session_request(self._model, options, None)
            self._names = [plugin.ep.name for plugin in self._wanted.plugins]
            return self._wanted.why_not("fail")
        except Exception as error:
            return _error_text(error)

    def to_file(self, output: Any) -> bool:
        """Writes the compiled model with its binaries, named as ONNX Runtime names them."""
        path = os.fspath(output) if isinstance(output, (str, os.PathLike)) else ""
        why = ""
        if not path or not path.endswith(".onnx"):
            why = "the output has no name that ends with .onnx"
        elif os.path.lexists(path) and (self._keeps_files or not _is_regular(path)):
            why = f"{path} exists already"
        elif not os.path.isdir(os.path.dirname(path) or "."):
            why = f"there is no directory {os.path.dirname(path)}"

        def write(answer: Artefact) -> bytes:
            copy_artefact(answer, os.path.dirname(path) or ".", True, os.path.basename(path))
            return b""

        return self._made(write, why) is not None

    def to_bytes(self) -> bytes | None:
        """Returns the compiled model, None if ONNX Runtime is to compile it."""

        def read(answer: Artefact) -> bytes:
            if len(answer.files) != 1:
                raise _errors.Unavailable("the compiled model has files beside the graph")
            with open(answer.path, "rb") as file:
                return file.read()

        return self._made(read, "" if self._embed else "its binaries have no place to be written")

    def _made(self, take: Any, why: str) -> bytes | None:
        started, result, answer = time.perf_counter(), None, None
        why = self._why or why
        try:
            if not why:
                answer = self._answer()
                with answer:
                    result = take(answer)
        except Exception as error:
            why = _error_text(error)
        _report.add(
            "compile",
            model=_name(self._model),
            outcome=answer.outcome
            if result is not None and answer is not None
            else ("bypassed" if answer is None and self._why else "failed"),
            why=answer.why if result is not None and answer is not None else why,
            asked=self._names,
            providers=self._names,
            build=answer.build if answer is not None else "",
            compile_seconds=answer.compile_seconds if result is not None and answer else 0.0,
            acquire_seconds=time.perf_counter() - started,
        )
        return result

    def _answer(self) -> Artefact:
        assert self._wanted is not None and self._wanted.record is not None
        on_miss = settings().on_miss
        # A claim would be compiled as ONNX Runtime itself does next.
        wishes = {"on_miss": "wait" if on_miss == "claim" else on_miss, "embed": self._embed}
        answer = self._wanted.question(shared_client(), wishes)(
            graph_optimization_level=self._level
        )
        if answer.fd is None:
            answer.close()
            raise _errors.Unavailable(f"the daemon answered {answer.outcome}: {answer.why}")
        # The program loads the model with its own options, which need not have these.
        further = answer.load_options().keys() - self._wanted.record.entries.keys()
        if further:
            answer.close()
            raise _errors.Unavailable(
                f"the stored build is loaded with the option {min(further)}, and the program may "
                "not set it"
            )
        return answer


def _is_regular(path: str) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)
