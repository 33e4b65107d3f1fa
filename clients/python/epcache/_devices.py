"""Compares ONNX Runtime's devices with selectors, as the daemon does, and makes selectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._request import Device


def matches(selector: Device, device: Any) -> bool:
    """Whether the selector fits a device, an OrtEpDevice."""
    hardware = device.device
    return (
        selector.type in ("", hardware.type.name)
        and selector.vendor_id in (0, hardware.vendor_id)
        and selector.device_id in (0, hardware.device_id)
        and pairs(device).issuperset(selector.metadata.items())
    )


def pairs(device: Any) -> set[tuple[str, str]]:
    """Returns the metadata of the hardware and of the execution provider. A key may be twice."""
    return {*device.device.metadata.items(), *device.ep_metadata.items()}


def selector(device: Any, listed: Sequence[Any]) -> Device | None:
    """Returns a selector for which the daemon, which uses the first device that fits, uses this
    one of those that its execution provider lists. None if there is no such selector.

    It has metadata only if an earlier device has equal ids, so that on other machines requests for
    the same device are the same however they are written.
    """
    hardware = device.device
    plain = Device(hardware.type.name, hardware.vendor_id, hardware.device_id)
    own = pairs(device)
    alike = [one for one in listed if one.ep_name == device.ep_name and matches(plain, one)]
    same = [one for one in alike if pairs(one) == own]
    if len(same) > 1 and same[0] is not device:
        return None
    if not same or same[0] is alike[0]:
        return plain
    chosen: dict[str, str] = {}
    others = [pairs(one) for one in alike if pairs(one) != own]
    while others:
        excluded = {pair: sum(pair not in other for other in others) for pair in own if pair[1]}
        key, value = min(excluded, key=lambda pair: (-excluded[pair], pair), default=("", ""))
        if not excluded.get((key, value)):
            break
        chosen[key] = value
        others = [other for other in others if (key, value) in other]
    found = Device(plain.type, plain.vendor_id, plain.device_id, chosen)
    return found if next(one for one in alike if matches(found, one)) is same[0] else None
