"""The sessions of a group without a daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip(
    "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
)

import epcache  # noqa: E402
from providers import INPUTS, OPENVINO, equal, make_model, run_plain  # noqa: E402


def test_without_a_daemon_every_session_is_a_plain_one(tmp_path: Path) -> None:
    if reason := OPENVINO.missing():
        pytest.skip(reason)
    paths = [make_model(tmp_path / f"{seed}.onnx", seed) for seed in (1, 2)]
    with pytest.warns(epcache.EpcacheWarning, match="no daemon") as warned:
        loaded = epcache.SessionGroup(
            paths, ep=(OPENVINO.name, OPENVINO.options), client=epcache.Client(tmp_path / "missing")
        )
    assert len(warned) == 1
    with loaded:
        assert [s.epcache.outcome for s in loaded] == ["no daemon"] * 2
        for session, path in zip(loaded, paths, strict=True):
            assert equal(session.run(None, INPUTS), run_plain(OPENVINO, path))
    assert len(loaded) == 0
    loaded.close()


def test_loop_over_a_temporary_group(tmp_path: Path) -> None:
    if reason := OPENVINO.missing():
        pytest.skip(reason)
    paths = [make_model(tmp_path / f"{seed}.onnx", seed) for seed in (1, 2)]

    def group() -> epcache.SessionGroup:
        return epcache.SessionGroup(paths, ep=(OPENVINO.name, OPENVINO.options), client=False)

    expected = [run_plain(OPENVINO, path) for path in paths]
    for made in (
        [s.run(None, INPUTS) for s in group()],
        [s.run(None, INPUTS) for s in list(group())],
    ):
        assert len(made) == len(expected)
        for one, plain in zip(made, expected, strict=True):
            assert equal(one, plain)
