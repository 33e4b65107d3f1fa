"""A factory image: a store that programs without epcached read in place, without a daemon."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import child
import pytest
from daemon import Daemon

EP = "OpenVINOExecutionProvider"
OPTIONS = {"load_config": json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "f32"}})}
ALIKE = {
    "load_config": json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": "1"}})
}
MODEL = "tiny-mlp"
PACKED = "magika"
SIZE = ["--dim", "unk__214=1"]
GROUP = ["tiny-free-dimension", "tiny-convolution"]
NOBODY = 65534


def wish(options: dict[str, str]) -> list[str]:
    return ["--ep", f"{EP}:CPU", "--option", f"load_config={options['load_config']}"]


@pytest.fixture(scope="module")
def image(
    start: Callable[..., Daemon], runtime: Callable[[str], Path], models: Any
) -> Iterator[Path]:
    """A directory with the store, made readable for all, the models and epcachectl; for root
    mounted read-only. The store has a model, another one with two options, one of which is packed
    ("packed" has those options), and a group.
    """
    daemon = start(runtime("openvino-1.8.1"))
    daemon.control("get", str(models.path(MODEL)), *wish(OPTIONS))
    options = {}
    for one in (OPTIONS, ALIKE):
        (answer,) = daemon.control("get", str(models.path(PACKED)), *wish(one), *SIZE)
        options[answer["build"]] = one
    daemon.control("get", "--share", *(str(models.path(name)) for name in GROUP), *wish(OPTIONS))
    assert daemon.stop() == 0
    daemon.start()  # which has given out nothing lately
    packed = list(options)[1]
    assert daemon.control("pack", packed)["changed"] == 1
    assert daemon.stop() == 0
    directory = Path(tempfile.mkdtemp(prefix="epcached-image-"))
    subprocess.run(["cp", "-a", daemon.state, directory / "store"], check=True)
    (directory / "store" / "lock").unlink()
    # kept by the daemon for clients that may still use it
    for graph in (directory / "store" / "views").glob(f"*/*/*/{packed[:16]}_ctx.onnx"):
        subprocess.run(["rm", "-r", graph.parents[1]], check=True)
    for name in (MODEL, PACKED, *GROUP):
        shutil.copy(models.path(name), directory / f"{name}.onnx")
    shutil.copy(Path(os.environ["EPCACHED_BIN"]) / "epcachectl", directory)
    (directory / "packed").write_text(json.dumps(options[packed]))
    subprocess.run(["chmod", "-R", "a+rX", directory], check=True)
    mounted = False
    if os.geteuid() == 0:
        subprocess.run(["mount", "--bind", directory / "store", directory / "store"], check=True)
        mounted = True
        subprocess.run(["mount", "-o", "remount,bind,ro", directory / "store"], check=True)
    yield directory
    if mounted:
        subprocess.run(["umount", directory / "store"], check=True)
    shutil.rmtree(directory)


def get(
    image: Path,
    *arguments: str | Path,
    user: int = 0,
    names: Sequence[str] = (MODEL,),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    command = [
        image / "epcachectl",
        "get",
        *(image / f"{name}.onnx" for name in names),
        "--state",
        image / "store",
        *arguments,
    ]
    nobody = {"user": user, "group": user, "extra_groups": []} if user else {}
    environment["PATH"] = os.environ["PATH"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, **nobody
    )  # type: ignore[call-overload]


def computed(
    graph: Path, name: str, runtime: Path, models: Any, options: dict[str, str] = OPTIONS
) -> tuple[Any, Any]:
    """Returns the output of the compiled graph in a program without epcached, and of plain ONNX
    Runtime.
    """
    wishes = {"model": models.entry(name), "ep": EP, "options": options}
    ran = child.run("image", runtime, graph=str(graph), **wishes)
    assert ran["executed by"] == [EP]
    return ran["outputs"], child.run(
        "plain", runtime, path=str(models.path(name)), level="basic", **wishes
    )["sidecar"]["outputs"]


@pytest.mark.parametrize("user", [0, NOBODY], ids=["this user", "another user"])
def test_builds_of_an_image_are_served_in_place(
    image: Path, user: int, runtime: Callable[[str], Path], models: Any
) -> None:
    if user and os.geteuid():
        pytest.skip("only root can be another user")
    if not os.geteuid():
        with pytest.raises(OSError, match="Read-only"):
            (image / "store" / "x").write_bytes(b"")
    done = get(
        image,
        "--ep",
        f"{EP}:CPU",
        "--option",
        f"load_config={OPTIONS['load_config']}",
        "--json",
        user=user,
    )
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)
    assert (answer["outcome"], answer["compatibility"]) == ("hit", "unknown")
    assert answer["provider_options"] == {EP: OPTIONS}
    ran, plain = computed(
        Path(answer["view"]) / answer["graph"], MODEL, runtime("openvino-1.8.1"), models
    )
    assert ran == plain


@pytest.mark.parametrize("user", [0, NOBODY], ids=["this user", "another user"])
def test_a_packed_build_is_unpacked_into_the_callers_directory(
    image: Path, user: int, runtime: Callable[[str], Path], models: Any
) -> None:
    if user and os.geteuid():
        pytest.skip("only root can be another user")
    place = Path(tempfile.mkdtemp(prefix="epcached-home-"))
    try:
        os.chown(place, user or -1, user or -1)
        options = json.loads((image / "packed").read_text())
        asked = [*wish(options), *SIZE]
        before = sorted(p for p in (image / "store").rglob("*"))
        done = get(image, *asked, "--json", user=user, names=[PACKED], HOME=str(place))
        assert done.returncode == 0, done.stderr
        (answer,) = json.loads(done.stdout)
        view = Path(answer["view"])
        assert (
            view.is_relative_to(place / ".cache" / "epcached" / "unpacked")
            and view.stat().st_uid == user
        )
        ran, plain = computed(
            view / answer["graph"], PACKED, runtime("openvino-1.8.1"), models, options
        )
        assert ran == plain
        (again,) = json.loads(
            get(image, *asked, "--json", user=user, names=[PACKED], HOME=str(place)).stdout
        )
        assert again["view"] == str(view), "found there again"
        out = place / "out"
        done = get(
            image, *asked, "--out", out, user=user, names=[PACKED], XDG_CACHE_HOME="/proc/none"
        )
        assert done.returncode == 0, done.stderr
        for file in answer["files"]:
            name = Path(file["name"]).name
            assert (out / name).read_bytes() == (view / file["name"]).read_bytes()
        # Without a writable home there is still a directory for this user.
        done = get(
            image,
            *asked,
            "--",
            "cksum",
            "{}",
            user=user,
            names=[PACKED],
            HOME="/proc/none",
            TMPDIR=str(place),
        )
        assert done.returncode == 0, done.stderr
        assert (place / f"epcached-unpacked-{user or os.getuid()}").stat().st_mode & 0o777 == 0o700
        done = get(image, *asked, "--unpack-to", "/proc/none", user=user, names=[PACKED])
        assert done.returncode == 7 and "--unpack-to DIR" in done.stderr, done.stderr
        assert before == sorted(p for p in (image / "store").rglob("*"))
    finally:
        subprocess.run(["chmod", "-R", "u+w", place], check=True)
        shutil.rmtree(place)


@pytest.mark.parametrize("user", [0, NOBODY], ids=["this user", "another user"])
def test_a_group_and_its_models_in_place(
    image: Path, user: int, runtime: Callable[[str], Path], models: Any
) -> None:
    if user and os.geteuid():
        pytest.skip("only root can be another user")
    done = get(image, "--share", *wish(OPTIONS), "--json", user=user, names=GROUP)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert [answer["member"] for answer in answers] == [0, 1]
    for i, name in enumerate(GROUP):
        (alone,) = json.loads(get(image, *wish(OPTIONS), "--json", user=user, names=[name]).stdout)
        assert (alone["member"], alone["graph"]) == (i, answers[i]["graph"])
        assert alone["members"][i]["session_options"] == {"ep.share_ep_contexts": "1"}
        assert "ep.share_ep_contexts" not in alone["session_options"]
        ran, plain = computed(
            Path(alone["view"]) / alone["graph"], name, runtime("openvino-1.8.1"), models
        )
        assert ran == plain
    assert (
        get(image, "--share", *wish(OPTIONS), user=user, names=list(reversed(GROUP))).returncode
        == 3
    ), "another order is another group"


def test_request_that_is_not_in_the_image_is_a_miss(image: Path) -> None:
    done = get(image, "--ep", f"{EP}:CPU")
    assert done.returncode == 3 and "compiled for other requests only" in done.stderr


def test_unreadable_store_of_another_user_has_a_hint(image: Path) -> None:
    """A store that was not made readable for others: the error tells what its owner has to do."""
    if os.geteuid():
        pytest.skip("only root can be another user")
    closed = image / "closed"
    subprocess.run(["cp", "-a", image / "store", closed], check=True)
    (closed / "manifests").chmod(0o700)
    command = [image / "epcachectl", "get", image / f"{MODEL}.onnx", "--state", closed, "--ep", EP]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
    )
    assert done.returncode == 7 and "chmod -R a+rX" in done.stderr


def test_state_refuses_flags_of_the_daemon(image: Path) -> None:
    for flags in (
        ["--on-miss", "refresh"],
        ["--socket", "s"],
        ["--strict-ort"],
        ["--keep-going"],
        ["--store", "user"],
    ):
        done = get(image, "--ep", EP, *flags)
        assert (
            done.returncode == 2 and f"{flags[0]}" in done.stderr and "does not use" in done.stderr
        ), flags
