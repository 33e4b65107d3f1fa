"""Loads the libraries that a plugin needs and that lie beside it, where no run path leads to them.

Packages of some vendors do this when they are imported, but a library can be named without its
package. The worker does the same (internal/sharedlib).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from typing import BinaryIO

_LOAD, _DYNAMIC = 1, 2  # types of program headers
_NEEDED, _STRINGS, _NAME = 1, 5, 14  # tags of the dynamic section
_LONGEST = 256  # bytes of a name
# Every process has these from the system; a second one would not work beside it.
_FROM_SYSTEM = ("libstdc++.so.", "libgcc_s.so.", "libonnxruntime.so.")


def preload(plugin: str) -> bool:
    """Loads the libraries beside a plugin that it needs, or another of them, each after those that
    it needs itself. Returns whether there are any.
    """
    directory = os.path.dirname(plugin)
    beside = {}
    for place in (directory, directory + ".libs"):
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(place)):
                if name.endswith(".so") or ".so." in name:
                    path = os.path.join(place, name)
                    beside[_stated(path)[0] or name] = path
    order: list[str] = []
    _visit(plugin, beside, order, set())
    for path in order:
        # ONNX Runtime reports what is missing
        with contextlib.suppress(OSError):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return bool(order)


def _visit(path: str, beside: dict[str, str], order: list[str], seen: set[str]) -> None:
    seen.add(path)
    for name in _stated(path)[1]:
        found = beside.get(name, "")
        if found and found not in seen and not name.startswith(_FROM_SYSTEM):
            _visit(found, beside, order, seen)
            order.append(found)


def _stated(path: str) -> tuple[str, list[str]]:
    """Returns the SONAME of a library, and those that it needs. A file that is not ELF (64 bits,
    little endian) has none.
    """
    with contextlib.suppress(OSError, struct.error, UnicodeDecodeError), open(path, "rb") as file:
        return _read(file)
    return "", []


def _read(file: BinaryIO) -> tuple[str, list[str]]:
    head = file.read(64)
    if head[:6] != b"\x7fELF\x02\x01":
        return "", []
    (start,), (size, count) = (
        struct.unpack_from("<Q", head, 32),
        struct.unpack_from("<HH", head, 54),
    )
    loaded, dynamic = [], (0, 0)
    for i in range(count):
        file.seek(start + i * size)
        kind, _, offset, address, _, length = struct.unpack("<IIQQQQ", file.read(40))
        if kind == _LOAD:
            loaded.append((address, offset, length))
        elif kind == _DYNAMIC:
            dynamic = (offset, min(length, 1 << 16))
    file.seek(dynamic[0])
    entries = list(struct.iter_unpack("<QQ", file.read(dynamic[1] // 16 * 16)))
    strings = next((value for tag, value in entries if tag == _STRINGS), 0)
    base = next((o + strings - a for a, o, n in loaded if a <= strings < a + n), 0)

    def text(at: int) -> str:
        file.seek(base + at)
        return file.read(_LONGEST).partition(b"\0")[0].decode()

    names = [text(value) for tag, value in entries if tag == _NAME]
    needed = [text(value) for tag, value in entries if tag == _NEEDED]
    return (names or [""])[0], needed
