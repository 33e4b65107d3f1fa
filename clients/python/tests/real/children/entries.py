"""An application that makes sessions on a plugin execution provider by every API, in sequence."""

from __future__ import annotations

import pathlib
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import epcache
import inference
import onnxruntime as ort


def run(model: dict[str, Any], path: str, ep: str, options: dict[str, str]) -> dict[str, Any]:
    """Returns the result of each API, with the output if it made a session; and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ways = Ways(model, path, ep, options)
        answers = {name: getattr(ways, name)() for name in ("cold", *NAMES)}
    told = [str(w.message) for w in caught if issubclass(w.category, epcache.EpcacheWarning)]
    return {"version": ort.__version__, "ways": answers, "warnings": told}


class Ways:
    def __init__(self, model: dict[str, Any], path: str, ep: str, options: dict[str, str]) -> None:
        self._model, self._path, self._ep, self._options = model, path, ep, options
        self._spec = (f"{ep}:CPU", options)

    def _made(self, *arguments: Any, **more: Any) -> dict[str, Any]:
        return self._told(epcache.InferenceSession(*arguments, **more))

    def _told(self, session: Any) -> dict[str, Any]:
        outputs = inference.exact(inference.outputs(session, self._model))
        return {
            "outcome": session.epcache.outcome,
            "provider": session.get_providers()[0],
            "outputs": outputs,
        }

    def cold(self) -> dict[str, Any]:
        return {"outcome": epcache.why(self._path, ep=self._spec).decision}

    def warm(self) -> dict[str, Any]:
        (warmed,) = epcache.warm([self._path], ep=self._spec, wait=True)
        return {"outcome": warmed.outcome}

    def why(self) -> dict[str, Any]:
        return {"outcome": epcache.why(self._path, ep=self._spec).decision}

    def path(self) -> dict[str, Any]:
        return self._made(self._path, ep=self._spec)

    def path_object(self) -> dict[str, Any]:
        return self._made(pathlib.Path(self._path), epcache.SessionOptions(), ep=[self._spec])

    def in_memory(self) -> dict[str, Any]:
        return self._made(pathlib.Path(self._path).read_bytes(), ep=self._spec)

    def names(self) -> dict[str, Any]:
        return self._made(self._path, providers=[(self._ep, self._options), "CPUExecutionProvider"])

    def names_and_options(self) -> dict[str, Any]:
        return self._made(self._path, None, [self._ep, "CPUExecutionProvider"], [self._options, {}])

    def devices(self) -> dict[str, Any]:
        options = epcache.SessionOptions()
        options.add_provider_for_devices([inference.device(self._ep)], self._options)
        return self._made(self._path, options)

    def an_object(self) -> dict[str, Any]:
        one = epcache.ExecutionProvider(self._ep, (epcache.Device("CPU"),), self._options)
        return self._made(self._path, ep=one)

    def claim(self) -> dict[str, Any]:
        return self._made(self._path, ep=self._spec, on_miss="claim")

    def background(self) -> dict[str, Any]:
        return self._made(
            self._path, ep=self._spec, on_miss="background", meanwhile="CPUExecutionProvider"
        )

    def compile(self) -> dict[str, Any]:
        """Loads a copy with plain ONNX Runtime and the options of the answer."""
        with tempfile.TemporaryDirectory() as directory:
            made = epcache.compile(self._path, directory, ep=self._spec)
            options = ort.SessionOptions()
            options.add_provider_for_devices(
                [inference.device(self._ep)], made.provider_options[self._ep]
            )
            for key, value in made.session_options.items():
                options.add_session_config_entry(key, value)
            session = ort.InferenceSession(made.path, options, enable_fallback=0)
            outputs = inference.exact(inference.outputs(session, self._model))
            return {
                "outcome": made.outcome,
                "provider": session.get_providers()[0],
                "outputs": outputs,
            }


NAMES = [name for name in vars(Ways) if not name.startswith("_") and name != "cold"]
