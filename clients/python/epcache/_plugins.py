"""Finds the plugin libraries of execution providers, registers them with ONNX Runtime, and picks
devices.

The same code serves sessions from the cache and plain ones, so both run on the same execution
provider. Plain ONNX Runtime does not: given a provider's name only, it runs on the CPU and does not
say so.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from onnxruntime.capi import onnxruntime_pybind11_state

from . import _devices, _errors, _machine
from ._fields import dataclass, replace
from ._model import open_regular
from ._onnxruntime import ort
from ._request import Device, ExecutionProvider, Library, Runtime

# The Python packages of known execution providers. Other packages are found by their name's prefix.
_PACKAGES = {
    "OpenVINOExecutionProvider": "onnxruntime_ep_openvino",
    "QNNExecutionProvider": "onnxruntime_qnn",
}
_PACKAGE_PREFIX = "onnxruntime_"
_LIBRARIES = "libonnxruntime_providers_*.so*"


@dataclass(frozen=True)
class LibraryOption:
    """A provider option that names a library beside the provider's own."""

    name: str
    default: str  # passed if the option is absent
    unless: str  # another option that replaces the default


# The option with which a provider that is built into ONNX Runtime chooses its device. The plugin
# ignores it.
_DEVICE_OPTIONS = {"OpenVINOExecutionProvider": "device_type"}
_DEVICE = re.compile(r"(CPU|GPU|NPU)(\.\d+)?")

_LIBRARY_OPTIONS = {
    "QNNExecutionProvider": LibraryOption("backend_path", "libQnnHtp.so", "backend_type")
}
# Libraries without a name of their own: their provider has the name of its registration.
_NAMED_BY_REGISTRATION = {"libonnxruntime_providers_qnn.so": "QNNExecutionProvider"}

# The libraries that this process registered, by execution provider. The descriptor is that of the
# loaded file and stays open, because the file at the path may be replaced before a request.
_registered: dict[str, Library] = {}
_lock = _thread.allocate_lock()  # guards _registered, and makes check and registration atomic


@dataclass(frozen=True)
class Plugin:
    """An execution provider that is ready for use in this process."""

    ep: ExecutionProvider
    # ONNX Runtime's OrtEpDevice; empty for a built-in one that lists no devices
    devices: list[Any]
    library: Library | None  # None: part of ONNX Runtime itself

    @property
    def given(self) -> dict[str, str]:
        """The application's provider options, with those that name a file."""
        return {**self.ep.options, **self.ep.files}

    def options(self, given: Mapping[str, str]) -> dict[str, str]:
        """Returns the provider options for this process: libraries are replaced by those beside its
        own plugin.
        """
        result = dict(given)
        if self.library is None:
            return result
        file = os.path.basename(self.library.path)
        option = _LIBRARY_OPTIONS.get(_NAMED_BY_REGISTRATION.get(file, self.ep.name))
        if option is None:
            return result
        if option.unless not in result:
            result.setdefault(option.name, option.default)
        if option.name in result:
            beside = os.path.join(
                os.path.dirname(self.library.path), os.path.basename(result[option.name])
            )
            if os.path.exists(beside):
                result[option.name] = beside
        return result

    @property
    def version(self) -> str:
        """The execution provider's version as it states it; "" for one without devices."""
        return str(self.devices[0].ep_metadata.get("version", "")) if self.devices else ""

    def add_to(self, options: ort.SessionOptions, given: Mapping[str, str]) -> None:
        if self.devices:
            options.add_provider_for_devices(self.devices, self.options(given))
            return
        try:
            options.add_provider(self.ep.name, dict(given))
        except Exception as error:
            device = given.get(_DEVICE_OPTIONS.get(self.ep.name, ""))
            if device is None:
                raise
            # Its devices are not listed, and ONNX Runtime's error does not name the device.
            text = (
                f"{self.ep.name}, which is part of this ONNX Runtime, does not accept device "
                f"{device}: {error}"
            )
            raise _errors.Unavailable(
                text,
                "the device may be missing, or another provider option wrong; ONNX Runtime's log "
                "has the reason",
            ) from error


def plugin(ep: ExecutionProvider, devices: list[Any] | None = None) -> Plugin:
    """Returns the execution provider with the devices that it names, or with `devices`. Registers
    its library if necessary.

    Raises Unavailable if the library or the device is missing.
    """
    with _lock:
        if devices is None:
            if _has_no_devices(ep):
                return Plugin(_named_device(ep), [], None)
            ep = _device_of_option(ep)
            devices = _matching_devices(ep, _listed_devices(ep))
        library = _library_of(ep, devices[0])
        if ep.library and library is not None and not _is_file(ep.library, library.path):
            raise _errors.Unavailable(
                f"{ep.name} is registered in this process from {library.path}, and not from "
                f"{ep.library}",
                "ONNX Runtime has one library for each name",
            )
        return Plugin(ep, devices, library)


def _is_file(path: str, other: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(path, other)
    return False


def _has_no_devices(ep: ExecutionProvider) -> bool:
    """Whether it is built into this ONNX Runtime without a list of devices, and no plugin for it is
    installed.
    """
    if ep.library or ep.name not in ort.get_available_providers():
        return False
    if ep.name in _registered or any(device.ep_name == ep.name for device in listed_devices()):
        return False
    return _packaged_library(ep.name) is None


def _named_device(ep: ExecutionProvider) -> ExecutionProvider:
    """Moves the device into the option with which a built-in provider chooses it."""
    if not ep.devices:
        return ep
    option = _DEVICE_OPTIONS.get(ep.name)
    if option is None or len(ep.devices) > 1 or replace(ep.devices[0], type="") != Device():
        text = f"{ep.name} is part of this ONNX Runtime and lists no devices: omit the device"
        raise _errors.Unavailable(text, "choose it by options such as device_id")
    return replace(ep, devices=(), options={option: ep.devices[0].type, **ep.options})


def _device_of_option(ep: ExecutionProvider) -> ExecutionProvider:
    """Moves the device out of that option, because a plugin ignores the option and would take the
    first device.
    """
    option = _DEVICE_OPTIONS.get(ep.name, "")
    if ep.devices or option not in ep.options:
        return ep
    options = dict(ep.options)
    wanted = _DEVICE.fullmatch(options.pop(option).upper())
    if wanted is None:
        text = f"{ep.name} as a plugin has no device {ep.options[option]!r}"
        raise _errors.Unavailable(
            text,
            f"combinations of devices are execution providers of their own, such as {ep.name}.AUTO",
        )
    metadata = {"ov_device": wanted[0]} if wanted[2] else {}
    return replace(ep, devices=(Device(wanted[1], metadata=metadata),), options=options)


def _listed_devices(ep: ExecutionProvider) -> list[Any]:
    """Returns the devices that ONNX Runtime lists for the provider, which is registered first if
    there are none.
    """
    found = [device for device in listed_devices() if device.ep_name == ep.name]
    if found:
        return found
    # OpenVINO lists further providers, as ".AUTO", under its own name and a suffix.
    family = ep.name.partition(".")[0]
    if family not in _registered:
        if not hasattr(ort, "register_execution_provider_library"):
            raise _errors.Unavailable(
                f"ONNX Runtime {ort.__version__} has no plugin execution providers, as {ep.name}",
                "pip install --upgrade onnxruntime: 1.24 is the first that epcache supports",
                {"devices": "0"},
            )
        _register(family, ep.library or _find_library(family))
        found = [device for device in listed_devices() if device.ep_name == ep.name]
    if not found:
        why, help = _machine.no_device(ep.name)
        raise _errors.Unavailable(
            f"{ep.name} lists no device on this machine: {why}", help, {"devices": "0"}
        )
    return found


def listed_devices() -> list[Any]:
    """Returns ONNX Runtime's list of devices; an early version has none."""
    return list(getattr(ort, "get_ep_devices", list)())


def _register(name: str, path: str) -> None:
    path = os.path.abspath(path)
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise _errors.Unavailable(f"library of {name}: {path}: {error.strerror}") from error
    try:
        _load(name, path)
    except Exception as error:
        os.close(descriptor)
        raise _errors.Unavailable(
            f"ONNX Runtime {ort.__version__} cannot load {path}: {error}"
        ) from error
    _registered[name] = Library(name, path, descriptor)


def _load(name: str, path: str) -> None:
    try:
        ort.register_execution_provider_library(name, path)
    except Exception as error:
        from . import _libraries

        if "cannot open shared object" not in str(error) or not _libraries.preload(path):
            raise
        ort.register_execution_provider_library(name, path)


def _candidates(name: str) -> Iterator[str]:
    """Yields the packages that may have the provider's library. The known one is first, because a
    list of installed packages takes milliseconds.
    """
    if name in _PACKAGES:
        yield _PACKAGES[name]
    yield from (one for one in packages() if one != _PACKAGES.get(name))


def packages() -> Iterator[str]:
    """Yields the installed packages that seem to have an execution provider, by their names and
    files, without importing them.
    """
    import glob
    import pkgutil

    for module in pkgutil.iter_modules():
        if module.ispkg and module.name.startswith(_PACKAGE_PREFIX):
            directory = os.path.join(getattr(module.module_finder, "path", ""), module.name)
            if module.name.startswith(_PACKAGE_PREFIX + "ep_") or glob.glob(
                os.path.join(glob.escape(directory), _LIBRARIES)
            ):
                yield module.name


def plugin_package(name: str) -> str:
    """Returns pip's name of the package with the provider's plugin; "" if none is known."""
    return _PACKAGES.get(name, "").replace("_", "-")


def provided_by(package: str) -> tuple[list[str], str]:
    """Returns the execution providers of a package, and their library. The package's import may
    raise anything.
    """
    imported = importlib.import_module(package)
    names = (
        imported.get_ep_names() if hasattr(imported, "get_ep_names") else [imported.get_ep_name()]
    )
    return [str(name) for name in names], str(imported.get_library_path())


def _packaged_library(name: str) -> str | None:
    """Returns the provider's library in an installed package, None if there is none."""
    for candidate in _candidates(name):
        # a broken package, or one of another kind, is skipped
        with contextlib.suppress(Exception):
            names, library = provided_by(candidate)
            if name in names:
                return library
    return None


def _find_library(name: str) -> str:
    if library := _packaged_library(name):
        return library
    package = plugin_package(name)
    if why := _machine.no_package(package):
        raise _errors.Unavailable(
            f"{name} is not installed: {why}", "use plain ONNX Runtime here", {"devices": "0"}
        )
    hint = f"pip install {package}" if package else "pass ExecutionProvider(library=...)"
    raise _errors.Unavailable(
        f"no installed package has the library of {name}", hint, {"missing_library": name}
    )


def command_hint(name: str) -> str:
    """Returns a hint for epcachectl run if no installed package has the provider's library."""
    if package := plugin_package(name):
        return f"pip install {package}, or name a directory that has it: --runtime DIR"
    known = ", ".join(sorted(known for known in _PACKAGES if plugin_package(known)))
    return (
        f"check its spelling: packages are known for {known}; for others name the directory: "
        "--runtime DIR"
    )


def _matching_devices(ep: ExecutionProvider, listed: list[Any]) -> list[Any]:
    """Returns the first matching device of each selector, as the daemon does."""
    chosen = []
    for selector in ep.devices or (Device(),):
        fitting = [device for device in listed if _devices.matches(selector, device)]
        if not fitting:
            have = "; ".join(_describe_device(d, selector.metadata) for d in listed)
            raise _errors.Unavailable(
                f"{ep.name} has no {_describe_selector(selector)} on this machine; it lists {have}"
            )
        chosen.append(fitting[0])
    return chosen


def _describe_selector(selector: Device) -> str:
    ids = [
        f"{name} {value:#x}"
        for name, value in (("vendor", selector.vendor_id), ("device", selector.device_id))
        if value
    ]
    more = ", ".join(
        [*ids, *(f"{key}={value}" for key, value in sorted(selector.metadata.items()))]
    )
    return (selector.type or "device") + (f" ({more})" if more else "")


def _describe_device(device: Any, keys: Iterable[str]) -> str:
    """Describes a device by the fields that a selector with these metadata keys compares."""
    hardware, metadata = device.device, dict(_devices.pairs(device))
    pairs = (f"{key}={metadata[key]}" if key in metadata else f"no {key}" for key in sorted(keys))
    ids = (
        f"vendor {hardware.vendor_id:#x} {hardware.vendor}".strip(),
        f"device {hardware.device_id:#x}",
    )
    return f"{hardware.type.name} ({', '.join([*ids, *pairs])})"


def _library_of(ep: ExecutionProvider, device: Any) -> Library | None:
    family = ep.name.partition(".")[0]
    if family in _registered:
        own = _registered[family]
        return Library(ep.name, own.path, own.fd)
    path = device.ep_metadata.get("library_path", "")
    if not path:
        return None
    # The application itself registered it.
    with contextlib.suppress(OSError, _errors.Error):
        _registered[family] = Library(family, path, open_regular(path))
        return Library(ep.name, path, _registered[family].fd)
    return Library(ep.name, path)


def runtime(plugins: list[Plugin], beside: bool = False) -> Runtime:
    """Returns the libraries with which this process will load the artefact; with `beside` including
    all that a daemon needs that does not have them.

    The directory is empty on purpose, because the daemon may know it by another name, and the
    libraries identify the runtime.
    """
    directory = os.path.join(os.path.dirname(os.path.abspath(ort.__file__)), "capi")
    libraries = sorted(
        name for name in os.listdir(directory) if name.startswith("libonnxruntime.so.")
    )
    return Runtime(
        ort_version=ort.__version__,
        # The daemon cannot register a provider that is built into ONNX Runtime.
        ort_library=os.path.join(directory, libraries[0])
        if libraries and all(p.library is not None for p in plugins)
        else "",
        libraries=tuple(
            _sent_library(p, beside) for p in plugins if beside or p.library is not None
        ),
    )


def _sent_library(plugin: Plugin, beside: bool) -> Library:
    """Returns the library of a provider; of a built-in one, ONNX Runtime's Python module."""
    library = plugin.library
    if library is None:
        path = str(onnxruntime_pybind11_state.__file__)
        with _lock:
            if path not in _registered:
                _registered[path] = Library(path, path, open_regular(path))
            library = Library(plugin.ep.name, path, _registered[path].fd)
    return replace(library, beside=beside)
