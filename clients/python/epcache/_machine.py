"""Says why an execution provider has no device or package on this machine, and what would help."""

from __future__ import annotations

import os
import platform

# The wheels of plugin packages: machine -> oldest glibc. QNN's need Python 3.11 or later.
_WHEELS = {
    "onnxruntime-ep-openvino": {"x86_64": (2, 28)},
    "onnxruntime-qnn": {"x86_64": (2, 35), "aarch64": (2, 34)},
}
_PLAIN = "plain ONNX Runtime is the best on this processor"


def no_device(name: str) -> tuple[str, str]:
    """Returns why the provider lists no device, and what would help."""
    if name.startswith("OpenVINO") and (vendor := _vendor()) != "GenuineIntel":
        return f"it supports Intel's devices only, and this processor is {vendor}'s", _PLAIN
    return "its driver may be missing, or it does not support this processor", (
        "for a GPU or NPU, install its driver and let this user open its device"
    )


def no_package(package: str) -> str:
    """Returns why the package has no wheel for this machine; "" if it has, or is not known."""
    known = _WHEELS.get(package)
    if known is None:
        return ""
    machine, libc = platform.machine(), _glibc()
    if machine not in known:
        return f"{package} has no wheel for {machine}"
    if libc is None:
        return f"{package} has no wheel for musl, only for glibc"
    oldest, have = (".".join(map(str, one)) for one in (known[machine], libc))
    return f"{package} needs glibc {oldest}, and this is {have}" if libc < known[machine] else ""


def installable() -> str:
    """Returns a plugin package that compiles on this machine, "" if none is known."""
    intel = platform.machine() == "x86_64" and _vendor() == "GenuineIntel"
    for package in ("onnxruntime-ep-openvino", "onnxruntime-qnn"):
        if not no_package(package) and (intel or package != "onnxruntime-ep-openvino"):
            return package
    return ""


def _vendor() -> str:
    """Returns the processor's vendor, such as "GenuineIntel", otherwise the architecture."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "vendor_id":
                    return value.strip()
    except OSError:
        pass
    return platform.machine()


def _glibc() -> tuple[int, int] | None:
    """Returns the version of glibc; None for another C library."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        major, minor = version.split(".")[:2]
        return (int(major), int(minor)) if name == "glibc" else None
    except (OSError, ValueError):
        return None
