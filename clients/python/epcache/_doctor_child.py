"""The doctor's child process: loads ONNX Runtime or an execution provider, and prints the result as
one line of JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _errors
from ._doctor import MARK, client

if TYPE_CHECKING:
    from . import _plugins


def tell(what: str, *arguments: str) -> None:
    looks: dict[str, Callable[..., dict[str, Any]]] = {
        "onnxruntime": _onnxruntime,
        "built in": _built_in,
        "packages": _packages,
        "package": _package,
    }
    try:
        told = looks[what](*arguments)
    except Exception as error:  # libraries and their packages may raise anything
        told = {"error": f"{type(error).__name__}: {error}"}
    print(f"\n{MARK}{json.dumps(told)}", flush=True)
    os._exit(0)  # because some libraries crash when they are unloaded


def _onnxruntime() -> dict[str, Any]:
    import onnxruntime as ort

    return {
        "version": ort.__version__,
        "directory": os.path.dirname(os.path.abspath(ort.__file__)),
        "providers": ort.get_available_providers(),
        "plugins": hasattr(ort, "register_execution_provider_library"),
    }


def _built_in(*names: str) -> dict[str, Any]:
    """Returns the packages that have the named execution providers as plugins."""
    from . import _plugins

    return {
        "plugins": {name: package for name in names if (package := _plugins.plugin_package(name))}
    }


def _packages() -> dict[str, Any]:
    from . import _plugins

    return {"packages": sorted(_plugins.packages())}


def _package(package: str, socket: str) -> dict[str, Any]:
    from . import _plugins

    names, _ = _plugins.provided_by(package)
    return {"providers": [{"name": name, **_provider(name, socket)} for name in names]}


def _provider(name: str, socket: str) -> dict[str, Any]:
    import onnxruntime as ort

    from . import _plugins, _policy
    from ._functions import why
    from ._request import ExecutionProvider

    try:
        plugin = _plugins.plugin(ExecutionProvider(name))
    except _errors.Unavailable as error:
        return {"error": error.text, "hint": error.hint, "facts": error.facts}
    told: dict[str, Any] = {
        "library": plugin.library.path if plugin.library else "",
        "version": plugin.version,
        "devices": sorted(
            {device.device.type.name for device in ort.get_ep_devices() if device.ep_name == name}
        ),
    }
    if failed := _start(plugin, name):
        return {"error": f"it does not start with ONNX Runtime {ort.__version__}: {failed}"}
    if socket:
        try:
            with client(socket) as asked:
                told["decision"] = why(_policy._MODEL, ep=name, client=asked).decision
        except _errors.Error as error:
            told.update(
                refusal=error.text,
                hint=error.hint or "on_miss='claim' compiles with this process's own libraries",
            )
    return told


def _start(plugin: _plugins.Plugin, name: str) -> str:
    """Makes a session, because some execution providers can be registered and fail only then.
    Returns the error, "" if there is none.
    """
    import onnxruntime as ort

    from . import _policy

    options = ort.SessionOptions()
    try:
        plugin.add_to(options, {})
        # by default ONNX Runtime falls back to the CPU
        session = ort.InferenceSession(_policy._MODEL, options, enable_fallback=0)
    except Exception as error:  # ONNX Runtime may raise anything
        return f"{type(error).__name__}: {error}"
    names = session.get_providers()
    return "" if name in names else f"a session with its devices runs on {', '.join(names)}"
