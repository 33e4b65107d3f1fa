"""The parts of a request: execution providers, output options, and the runtime's libraries."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

from . import _wire
from ._model import open_regular
from ._fields import dataclass, field, replace

Send = Callable[[int], int]  # adds a descriptor to the request; returns its index there

MAX_BESIDE = 512


@dataclass(frozen=True)
class Device:
    """Selects a device of an execution provider, the first one that matches; an empty field matches
    all.

    As text after the provider's name: "EP:NPU,vendor=0x8086,device=0x643e,KEY=VALUE", all parts
    optional.
    """

    type: str = ""  # "CPU", "GPU", "NPU"
    vendor_id: int = 0  # PCI vendor id, such as 0x8086; 0 matches all
    device_id: int = 0  # 0 matches all
    # further keys as ONNX Runtime lists them for the device, such as {"ov_device": "GPU.1"}
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ExecutionProvider:
    """An execution provider of a request, by ONNX Runtime's name, with its provider options.

    `files` has the options that name a file, identified by its content: option to path. `library`
    is the plugin library, if epcache does not find it in a Python package; only sessions use it.
    """

    name: str  # as in ONNX Runtime, such as "QNNExecutionProvider"
    devices: tuple[Device, ...] = ()  # to compile for; () is the first listed device
    # provider options, as text
    options: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    library: str = ""

    def message(self, send: Send, stack: contextlib.ExitStack) -> _wire.Message:
        """Returns the message; files are opened, sent with `send`, and closed when `stack` is."""
        option_fds = {}
        for option, path in self.files.items():
            descriptor = open_regular(path)
            stack.callback(os.close, descriptor)
            option_fds[option] = send(descriptor)
        devices = [
            {
                "type": d.type,
                "vendor_id": d.vendor_id,
                "device_id": d.device_id,
                "metadata": dict(d.metadata),
            }
            for d in self.devices
        ]
        return {
            "name": self.name,
            "devices": devices,
            "options": dict(self.options),
            "option_fds": option_fds,
        }


EPSpec = Union[str, "tuple[str, Mapping[str, Any]]", ExecutionProvider]


def providers(specification: EPSpec | Sequence[EPSpec]) -> list[ExecutionProvider]:
    """Returns the execution providers of one specification or of several, in their order."""
    if isinstance(specification, (str, ExecutionProvider)) or _is_pair(specification):
        specification = [specification]  # type: ignore[list-item]
    found = [_provider(one) for one in specification]  # type: ignore[arg-type]
    if not found:
        raise ValueError("no execution provider named; for example 'OpenVINOExecutionProvider:CPU'")
    return found


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def _provider(specification: EPSpec) -> ExecutionProvider:
    if isinstance(specification, ExecutionProvider):
        return specification
    pair: Any = specification if _is_pair(specification) else (specification, {})
    name, options = pair
    if not isinstance(name, str) or not name:
        raise TypeError(
            f"execution provider {specification!r}: it must be a name, (name, options) or "
            "ExecutionProvider"
        )
    name, _, device = name.partition(":")
    devices = (_device(device),) if device else ()
    return ExecutionProvider(
        name, devices, {str(key): option_text(value) for key, value in options.items()}
    )


def _device(text: str) -> Device:
    """Parses TYPE,vendor=N,device=N,KEY=VALUE, which is also the form of epcachectl's --ep."""
    kind, *parts = text.split(",")
    if "=" in kind:
        kind, parts = "", [kind, *parts]
    ids = {"vendor": 0, "device": 0}
    metadata = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not key or not equals:
            raise ValueError(f"device {text!r}: {part!r} is not KEY=VALUE")
        if key not in ids:
            metadata[key] = value
            continue
        try:
            ids[key] = int(value, 0)
        except ValueError:
            raise ValueError(
                f"device {text!r}: {part!r} is not an id such as {key}=0x8086"
            ) from None
    return Device(kind.upper(), ids["vendor"], ids["device"], metadata)


def option_text(value: Any) -> str:
    """Returns an option's value as text; True and False are "1" and "0", as in ONNX Runtime."""
    return str(int(value)) if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Output:
    """How ONNX Runtime writes the compiled model. Every field is part of the request key.

    Initializers of nodes that are left to the CPU, and weights of weightless contexts, are stored
    in the graph by default. From `external_initializers_threshold` bytes on they are stored in
    `external_initializers_file`, a file of the artefact. With `keep_initializers_in_source` they
    stay in the model's external data, which becomes part of the artefact. `complete` fails a
    compile that would leave a node to the CPU.
    """

    external_initializers_file: str = ""
    external_initializers_threshold: int = 0
    keep_initializers_in_source: bool = False
    node_name_prefix: str = ""  # of the EPContext nodes; execution providers may ignore it
    complete: bool = False

    def message(self) -> _wire.Message:
        return dict(vars(self))


@dataclass(frozen=True)
class Library:
    """A plugin library of this process. `fd`, if given, is a descriptor of the file, which the
    caller owns.

    With `beside` the libraries beside it are sent as well, so that a daemon without this file can
    identify the SDK.
    """

    ep: str  # the execution provider's name
    path: str  # absolute
    fd: int | None = None
    beside: bool = False

    def neighbours(self) -> dict[str, str] | None:
        """Returns the other shared libraries in the directory, and in DIRECTORY.libs, where wheels
        have bundled libraries.

        The keys are paths relative to the directory. None if there are more than MAX_BESIDE: then
        the library is identified by its path. The daemon and clients in other languages choose the
        same libraries (compilers.Beside).
        """
        directory = os.path.dirname(self.path)
        bundled = directory + ".libs"
        found: dict[str, str] = {}
        for place, prefix in ((directory, ""), (bundled, f"../{os.path.basename(bundled)}/")):
            for entry in sorted(_entries(place), key=lambda entry: entry.name):
                if _is_library(entry.name) and entry.is_file() and entry.path != self.path:
                    found[prefix + entry.name] = entry.path
        return found if len(found) <= MAX_BESIDE else None


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(directory))
    except OSError:
        return []


def _is_library(name: str) -> bool:
    return not name.startswith(".") and (name.endswith(".so") or ".so." in name)


@dataclass(frozen=True)
class Runtime:
    """The libraries that will load an artefact. Every field may be empty; if all are, it is the
    daemon's default runtime.
    """

    directory: str = ""  # as made by `pip install --target`
    ort_version: str = ""  # such as "1.24.4"
    ort_library: str = ""  # path of libonnxruntime
    libraries: tuple[Library, ...] = ()  # of the execution providers

    def message(self, send: Send, stack: contextlib.ExitStack) -> _wire.Message:
        """Returns the message. Descriptors are sent with `send`; `stack` closes those that are
        opened here.
        """
        message = self.described()
        for library, described in zip(self.libraries, message["ep_libraries"], strict=True):
            if library.fd is not None:
                described["fd"] = send(library.fd)
            if library.beside and (neighbours := library.neighbours()) is not None:
                described["beside"], described["complete"] = [], True
                for name, path in neighbours.items():
                    descriptor = open_regular(path)
                    stack.callback(os.close, descriptor)
                    described["beside"].append({"location": name, "fd": send(descriptor)})
        return message

    def with_neighbours(self) -> Runtime | None:
        """Returns the runtime with the neighbours of all libraries; None if that changes nothing or
        a library has no descriptor.
        """
        if (
            not self.libraries
            or all(one.beside for one in self.libraries)
            or any(one.fd is None for one in self.libraries)
        ):
            return None
        return replace(self, libraries=tuple(replace(one, beside=True) for one in self.libraries))

    def described(self) -> _wire.Message:
        """Returns the message without descriptors."""
        libraries = [{"ep": library.ep, "path": library.path} for library in self.libraries]
        return {
            "directory": self.directory,
            "ort_version": self.ort_version,
            "ort_library": self.ort_library,
            "ep_libraries": libraries,
        }
