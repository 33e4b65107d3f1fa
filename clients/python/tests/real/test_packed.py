"""Packed builds with the real daemon: unpacked when requested, and their layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
from daemon import Daemon

EP = "OpenVINOExecutionProvider"
HINT = {"INFERENCE_PRECISION_HINT": "f32"}
MODEL = "magika"


def options(**more: str) -> dict[str, str]:
    return {"load_config": json.dumps({"CPU": {**HINT, **more}})}


def test_a_packed_build_is_unpacked_loads_and_computes(
    start: Callable[..., Daemon], runtime: Callable[[str], Path], models: Any
) -> None:
    where = runtime("openvino-1.8.1")
    daemon = start(where)

    def get(one: dict[str, str]) -> dict[str, Any]:
        wish = [
            "--ep",
            f"{EP}:CPU",
            "--option",
            f"load_config={one['load_config']}",
            "--dim",
            "unk__214=1",
        ]
        (answer,) = daemon.control("get", str(models.path(MODEL)), *wish)
        return dict(answer)

    made = {get(one)["build"]: one for one in (options(), options(NUM_STREAMS="1"))}
    assert daemon.stop() == 0
    daemon.start()  # which has given out nothing lately
    would = daemon.control("pack", "--all", "-n")  # which compares them, unless that was done
    told = daemon.control("du")
    assert told["packable_bytes"] == would["freed_bytes"] > 1 << 20
    assert [one["shapes"] for model in told["models"] for one in model["builds"]] == [
        "unk__214=1"
    ] * 2
    # the first one is the base, and stays whole
    assert daemon.control("pack", list(made)[1])["changed"] == 1
    (packed,) = [
        one
        for model in daemon.control("du")["models"]
        for one in model["builds"]
        if one["kept_as"] == "packed"
    ]

    answer = get(made[packed["build"]])
    assert (answer["outcome"], answer["build"]) == ("hit", packed["build"])
    assert daemon.control("status")["space"]["unpacked_bytes"] > 0
    wishes = {"model": models.entry(MODEL), "ep": EP, "options": made[packed["build"]]}
    ran = child.run("image", where, graph=str(Path(answer["view"]) / answer["graph"]), **wishes)
    assert ran["executed by"] == [EP]
    assert (
        ran["outputs"]
        == child.run("plain", where, path=str(models.path(MODEL)), level="basic", **wishes)[
            "sidecar"
        ]["outputs"]
    )

    space = daemon.control("check", "--space")["space"]
    accounted = {
        one["name"]: one["accounted_bytes"] for one in space if one["accounted_bytes"] is not None
    }
    assert (
        accounted.items()
        >= {
            one["name"]: one["disk_bytes"]
            for one in space
            if one["name"] in ("objects", "recipes", "unpacked", "manifests")
        }.items()
    )
    # bytes that occur twice in the base
    assert daemon.control("du")["packable_bytes"] < 1 << 20
    assert daemon.control("unpack", packed["build"])["changed"] == 1
    assert daemon.compiles() == 2
