"""why, warm and compile send the request of a session. With a fake daemon and a real execution
provider.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ort = pytest.importorskip(
    "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
)

import epcache  # noqa: E402
from epcache import _graph_names, _messages, _session  # noqa: E402
from fake_daemon import FakeDaemon, Peer  # noqa: E402
from openvino_model import source, view  # noqa: E402, F401
from providers import INPUTS, OPENVINO, equal, run_plain  # noqa: E402
from test_client import answer  # noqa: E402
from test_session import client, serves  # noqa: E402

ON_MISS = _messages.ENUMS["OnMiss"]


@pytest.fixture(autouse=True)
def without_daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("EPCACHE_SOCKET", "/nowhere")
    monkeypatch.setattr(_session, "_default_client", None)
    yield
    gc.collect()


@pytest.fixture
def options() -> epcache.SessionOptions:
    options = epcache.SessionOptions()
    options.add_free_dimension_override_by_name("batch", 1)
    return options


class Scripted:
    """A daemon that answers each request with the next of its replies, on any connection."""

    def __init__(self, *replies: dict[str, Any]) -> None:
        self.replies = list(replies)
        self.seen: list[dict[str, Any]] = []

    def __call__(self, peer: Peer) -> None:
        peer.hello()
        while True:
            request = peer.read()
            if "attach" in request:
                continue
            self.seen.append(request)
            reply = self.replies.pop(0)
            if "view" in reply:
                answer(peer, request, reply["view"])
            else:
                peer.send({"request": request["request"], **reply})


def background(job: str) -> dict[str, Any]:
    return {"acquire_reply": {"outcome": "background", "job": job, "why": "it is being compiled"}}


def ended(job: str, state: str, **more: Any) -> dict[str, Any]:
    return {"jobs_reply": {"jobs": [{"id": job, "state": state, **more}]}}


BUSY = {"error": {"class": 4, "text": "too much at once"}}
MISSING = {"error": {"class": 1, "text": "there is none"}}


# why


def test_why_sends_the_request_of_a_session(
    source: str, view: Path, options: epcache.SessionOptions
) -> None:
    explains = Scripted(
        {
            "acquire_reply": {
                "outcome": "explanation",
                "explanation": {"decision": "hit", "reason": "it is there"},
            }
        }
    )
    asked: list = []
    with FakeDaemon(explains) as daemon:
        told = epcache.why(source, options, ep=OPENVINO.spec, client=client(daemon))
    with FakeDaemon(serves(view, asked)) as daemon:
        epcache.InferenceSession(source, options, ep=OPENVINO.spec, client=client(daemon))
    assert (told.decision, told.reason) == ("hit", "it is there")
    ((session, _),) = asked
    ours = explains.seen[0]["acquire"]
    assert ours.pop("on_miss") == ON_MISS["EXPLAIN"]
    session.pop("on_miss")
    # neighbouring libraries are sent, otherwise the answer about equal libraries is wrong
    for library in ours["runtime"]["ep_libraries"]:
        assert library["beside"] and library["complete"]
        library.update(beside=[], complete=False)
    assert ours == session


def test_why_has_the_reason_for_bypassed(source: str) -> None:
    told = epcache.why(source, ort.SessionOptions(), ep=OPENVINO.spec)
    assert told.decision == "bypassed"
    assert "use epcache.SessionOptions" in told.reason


def test_functions_without_a_daemon_raise_no_daemon(source: str, tmp_path: Path) -> None:
    for ask in (
        epcache.why,
        epcache.warm,
        lambda *a, **k: epcache.compile(*a, tmp_path / "out", **k),
    ):
        with pytest.raises(epcache.NoDaemon):
            ask(source, ep=OPENVINO.spec)
    assert not (tmp_path / "out").exists()


# warm


def test_warm_does_not_wait_and_continues_after_a_failure(
    source: str, options: epcache.SessionOptions
) -> None:
    daemon_says = Scripted(background("j1"))
    with FakeDaemon(daemon_says) as daemon:
        (warmed,) = epcache.warm(source, options, ep=OPENVINO.spec, client=client(daemon))
    assert warmed == epcache.Warmed(source, "background", "it is being compiled", "j1")
    assert not warmed.ready
    asked = daemon_says.seen[0]["acquire"]
    assert (asked["on_miss"], asked["keep_going"], asked["free_dimensions"]) == (
        ON_MISS["BACKGROUND"],
        True,
        {"batch": 1},
    )


def test_warm_with_wait_continues_after_a_failure(source: str) -> None:
    error = {"class": 3, "text": "the compiler crashed"}
    daemon_says = Scripted(
        background("j1"), background("j2"), ended("j1", "failed", error=error), ended("j2", "done")
    )
    with FakeDaemon(daemon_says) as daemon:
        first, second = epcache.warm(
            [source, source], ep=OPENVINO.spec, client=client(daemon), wait=True
        )
    assert (first.outcome, first.why, first.ready) == ("failed", "the compiler crashed", False)
    assert (second.outcome, second.ready) == ("compiled", True)


def test_warm_waits_for_a_compile_if_the_daemon_is_busy(source: str) -> None:
    daemon_says = Scripted(background("j1"), BUSY, ended("j1", "done"), background("j2"))
    with FakeDaemon(daemon_says) as daemon:
        warmed = epcache.warm([source, source], ep=OPENVINO.spec, client=client(daemon))
    assert [one.job for one in warmed] == ["j1", "j2"]
    assert daemon_says.seen[2]["follow"] == {"job": "j1"}


def test_warm_fails_if_the_daemon_is_busy_with_other_compiles(source: str) -> None:
    with FakeDaemon(Scripted(BUSY)) as daemon:
        (warmed,) = epcache.warm(source, ep=OPENVINO.spec, client=client(daemon))
    assert (warmed.outcome, warmed.why) == ("failed", "too much at once")


@pytest.mark.parametrize("outcome", ["failed", "hit"])
def test_warm_looks_up_the_build_of_a_forgotten_job(source: str, view: Path, outcome: str) -> None:
    daemon_says = Scripted(
        background("j1"), MISSING, {"view": view} if outcome == "hit" else MISSING
    )
    with FakeDaemon(daemon_says) as daemon:
        (warmed,) = epcache.warm(source, ep=OPENVINO.spec, client=client(daemon), wait=True)
    assert warmed.outcome == outcome, warmed.why
    assert daemon_says.seen[2]["acquire"]["on_miss"] == ON_MISS["FAIL"]


def test_warm_of_an_unsupported_request_is_bypassed(source: str) -> None:
    (warmed,) = epcache.warm(source, ort.SessionOptions(), ep=OPENVINO.spec)
    assert warmed.outcome == "bypassed"
    assert "use epcache.SessionOptions" in warmed.why


# compile


def files(view: Path) -> list[dict[str, Any]]:
    return [
        {"name": f"abc/{path.name}", "size": path.stat().st_size}
        for path in (view / "abc").iterdir()
    ]


def test_compile_writes_a_copy_that_loads_without_the_daemon(
    source: str, view: Path, tmp_path: Path
) -> None:
    with FakeDaemon(
        serves(
            view, files=files(view), provider_options={OPENVINO.name: {"entries": OPENVINO.options}}
        )
    ) as daemon:
        made = epcache.compile(source, tmp_path / "out", ep=OPENVINO.spec, client=client(daemon))
    assert made.outcome == "hit"
    assert made.path == str(tmp_path / "out" / "x_ctx.onnx")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(
        path.name for path in (view / "abc").iterdir()
    )
    assert made.provider_options == {OPENVINO.name: OPENVINO.options}
    assert equal(run_plain(OPENVINO, made.path), run_plain(OPENVINO, source, INPUTS))


def test_compile_takes_a_name_for_the_graph(source: str, view: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with FakeDaemon(serves(view, files=files(view))) as daemon:
        made = epcache.compile(
            source, out, ep=OPENVINO.spec, client=client(daemon), name="a.b_ctx.onnx"
        )
        expected = {path.name.replace("x_ctx", "a.b_ctx") for path in (view / "abc").iterdir()}
        assert set(os.listdir(out)) == expected
        assert made.path == str(out / "a.b_ctx.onnx")
        with pytest.raises(ValueError, match="a file name"):
            epcache.compile(source, out, ep=OPENVINO.spec, client=client(daemon), name="a/b.onnx")
    assert equal(run_plain(OPENVINO, made.path), run_plain(OPENVINO, source, INPUTS))


def _message(*fields: tuple[int, bytes]) -> bytes:
    return b"".join(bytes((number << 3 | 2, len(value))) + value for number, value in fields)


def test_only_context_binaries_are_renamed() -> None:
    def model(name: bytes, doc: bytes = b"") -> bytes:
        attribute = _message((1, b"ep_cache_context"), (4, name))
        node = _message((4, b"EPContext"), (5, attribute), (5, _message((1, b"x"), (4, b"old"))))
        return b"\x08\x0a" + _message((7, _message((1, node), (10, doc))))

    renamed = _graph_names.renamed_contexts
    assert renamed(model(b"x.bin"), {"x.bin": "longer.bin"}) == model(b"longer.bin")
    assert renamed(model(b"y.bin"), {"x.bin": "longer.bin"}) == model(b"y.bin")
    with pytest.raises(epcache.ProtocolError, match="outside its contexts"):
        renamed(model(b"x.bin", b"x.bin"), {"x.bin": "longer.bin"})
    for cut in range(1, len(model(b"x.bin"))):
        try:
            renamed(model(b"x.bin")[:cut], {"x.bin": "longer.bin"})
        except epcache.ProtocolError:
            continue


def test_compile_replaces_other_files_only_with_overwrite(
    source: str, view: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with FakeDaemon(serves(view, files=files(view))) as daemon:
        first = epcache.compile(source, out, ep=OPENVINO.spec, client=client(daemon))
        assert (
            epcache.compile(source, out, ep=OPENVINO.spec, client=client(daemon)).path == first.path
        ), "the same is there"
        Path(first.path).write_bytes(b"another")
        with pytest.raises(FileExistsError, match="x_ctx.onnx exists"):
            epcache.compile(source, out, ep=OPENVINO.spec, client=client(daemon))
        assert Path(first.path).read_bytes() == b"another"
        epcache.compile(source, out, ep=OPENVINO.spec, client=client(daemon), overwrite=True)
    assert Path(first.path).read_bytes() == (view / "abc" / "x_ctx.onnx").read_bytes()
    assert not [name for name in os.listdir(out) if name.startswith(".")]


def test_a_graph_is_never_beside_the_files_of_another_build(
    source: str, view: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (view / "abc" / "x_ctx.bin").write_bytes(b"binary")
    out = tmp_path / "out"
    out.mkdir()
    (out / "x_ctx.onnx").write_bytes(b"graph of another build")
    real, written = os.rename, []

    def rename(old: Any, new: Any) -> None:
        if Path(new).parent == out:
            assert written or not (out / "x_ctx.onnx").exists()
            written.append(Path(new).name)
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    with FakeDaemon(serves(view, files=files(view))) as daemon:
        epcache.compile(source, out, ep=OPENVINO.spec, client=client(daemon), overwrite=True)
    assert written[-1] == "x_ctx.onnx" and "x_ctx.bin" in written


def test_compile_writes_nothing_outside_the_directory(
    source: str, view: Path, tmp_path: Path
) -> None:
    with FakeDaemon(
        serves(view, files=[{"name": "abc/x_ctx.onnx"}, {"name": "abc/../../escaped"}])
    ) as daemon:
        with pytest.raises(epcache.ProtocolError, match="escaped"):
            epcache.compile(source, tmp_path / "out", ep=OPENVINO.spec, client=client(daemon))
    assert not (tmp_path / "out").exists()


def test_compile_copies_the_source_of_a_weightless_model(
    source: str, view: Path, tmp_path: Path
) -> None:
    (view / "abc" / "source.onnx").write_bytes(b"weights")
    with FakeDaemon(
        serves(view, files=files(view), session_options={"ep.enable_weightless": "1"})
    ) as daemon:
        made = epcache.compile(source, tmp_path / "out", ep=OPENVINO.spec, client=client(daemon))
    assert made.session_options["ep.context_source_model_path"] == str(
        tmp_path / "out" / "source.onnx"
    )


def test_compile_without_an_artefact_is_an_error(source: str, tmp_path: Path) -> None:
    with FakeDaemon(
        Scripted({"acquire_reply": {"outcome": "passthrough", "why": "it is compiled already"}})
    ) as daemon:
        with pytest.raises(epcache.BadModel, match="passthrough: it is compiled already"):
            epcache.compile(source, tmp_path / "out", ep=OPENVINO.spec, client=client(daemon))
    with pytest.raises(epcache.Unavailable, match="use epcache.SessionOptions"):
        epcache.compile(source, tmp_path / "out", ort.SessionOptions(), ep=OPENVINO.spec)
    with pytest.raises(ValueError, match="on_miss 'background'"):
        epcache.compile(source, tmp_path / "out", ep=OPENVINO.spec, on_miss="background")


def test_import_of_epcache_does_not_import_onnxruntime() -> None:
    code = (
        "import sys, epcache; assert 'onnxruntime' not in sys.modules; assert {'why', 'warm', "
        "'compile'} <= set(epcache.__all__)"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_warm_of_a_name_that_is_not_utf8_keeps_the_other_models(
    source: str, view: Path, tmp_path: Path
) -> None:
    names = [b"a.onnx", b"b\xff.onnx", b"c.onnx"]
    paths = [os.fsdecode(os.path.join(os.fsencode(tmp_path), name)) for name in names]
    for path in paths:
        shutil.copy(source, path)
    seen: list = []
    with FakeDaemon(serves(view, seen)) as daemon:
        warmed = epcache.warm(paths, ep=OPENVINO.spec, client=client(daemon))
    assert [(Path(one.model).name, one.outcome) for one in warmed] == [
        ("a.onnx", "hit"),
        ("b\ufffd.onnx", "hit"),
        ("c.onnx", "hit"),
    ]
    assert [asked["model"]["name"] for asked, _ in seen] == ["a.onnx", "b\ufffd.onnx", "c.onnx"]


def test_text_that_is_not_utf8_is_an_error_of_the_request(source: str, view: Path) -> None:
    with FakeDaemon(serves(view)) as daemon, pytest.raises(epcache.BadRequest, match="not UTF-8"):
        client(daemon).acquire(source, (OPENVINO.name, {"a": "\udcff"}))
