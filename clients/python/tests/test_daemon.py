"""Sessions while the real daemon is stopped, killed, restarted, damaged or gets invalid requests.
Outputs are tested in real/.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import real_daemon

ort = pytest.importorskip(
    "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
)

import epcache  # noqa: E402
from descriptors import open_descriptors, opened_since  # noqa: E402
from epcache import _plugins  # noqa: E402
from providers import INPUTS, PROVIDERS, Provider, equal, make_model, run_plain  # noqa: E402
from real_daemon import Daemon, flip_a_bit  # noqa: E402

pytestmark = pytest.mark.skipif(bool(real_daemon.missing()), reason=real_daemon.missing() or "-")


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> Provider:
    if reason := request.param.missing():
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """A daemon that tests share, with the builds of all."""
    daemon = Daemon()
    daemon.start()
    yield daemon
    daemon.remove()


@pytest.fixture
def own() -> Iterator[Daemon]:
    """A daemon that a test may stop, kill and damage."""
    daemon = Daemon()
    daemon.start()
    yield daemon
    daemon.remove()


@pytest.fixture(autouse=True)
def every_warning_is_an_error() -> Iterator[None]:
    """Because a plain session would pass most of these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    gc.collect()


def session(source: str, provider: Provider, client: epcache.Client) -> epcache.InferenceSession:
    return epcache.InferenceSession(source, ep=provider.spec, client=client)


def runtime_of(provider: Provider) -> epcache.Runtime:
    return _plugins.runtime([_plugins.plugin(epcache.ExecutionProvider(provider.name))])


def test_compiled_once_then_hit(provider: Provider, shared: Daemon, tmp_path: Path) -> None:
    source = make_model(tmp_path / "model.onnx", seed=1)
    with shared.client() as client:
        first, second = session(source, provider, client), session(source, provider, client)
    assert (first.epcache.outcome, second.epcache.outcome) == ("compiled", "hit")
    assert first.epcache.compatibility == second.epcache.compatibility == "optimal"
    assert first.epcache.build == second.epcache.build
    assert equal(first.run(None, INPUTS), second.run(None, INPUTS))


def test_files_match_the_answer(provider: Provider, shared: Daemon, tmp_path: Path) -> None:
    source = make_model(tmp_path / "model.onnx", seed=2)
    with (
        shared.client() as client,
        client.acquire(source, provider.spec, runtime=runtime_of(provider)) as artefact,
    ):
        view = Path(f"/proc/self/fd/{artefact.fd}")
        sizes = {file.name: file.size for file in artefact.files}
        assert sizes == {name: (view / name).stat().st_size for name in sizes}
        assert {name.partition("/")[0] for name in sizes} == {os.path.dirname(artefact.graph)}
        assert equal(run_plain(provider, artefact.path), run_plain(provider, artefact.view_path))


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        pytest.param({"model": b"\x08no model at all"}, epcache.BadModel, id="not ONNX"),
        pytest.param(
            {"eps": "NoSuchExecutionProvider"}, epcache.Unavailable, id="unknown execution provider"
        ),
        pytest.param(
            {"eps": ("{ep}", {"no_such_option": "1"})}, epcache.BadRequest, id="unknown option"
        ),
        pytest.param(
            {"session_options": {"ep.context_file_path": "/x"}},
            epcache.NotAllowed,
            id="option that writes",
        ),
        pytest.param({"on_miss": "fail"}, epcache.NotFound, id="not compiled, and not to be"),
        pytest.param({"eps": ("{ep}:NPU", {})}, epcache.Unavailable, id="no such device"),
    ],
)
def test_errors_of_the_real_daemon(
    provider: Provider, shared: Daemon, tmp_path: Path, ask: dict, kind: type[epcache.Error]
) -> None:
    arguments = {
        "model": make_model(tmp_path / "refused.onnx", seed=5),
        "eps": provider.spec,
        **ask,
    }
    if isinstance(arguments["eps"], tuple):
        name, options = arguments["eps"]
        arguments["eps"] = (name.replace("{ep}", provider.name), options)
    with shared.client() as client:
        with pytest.raises(kind) as caught:
            client.acquire(**arguments)
        assert type(caught.value) is kind
        # it lives
        client.acquire(make_model(tmp_path / "model.onnx", seed=1), provider.spec).close()


def test_damaged_build_is_not_served_and_is_recompiled(
    provider: Provider, own: Daemon, tmp_path: Path
) -> None:
    source = make_model(tmp_path / "model.onnx", seed=6)
    with own.client() as client:
        want = session(source, provider, client).run(None, INPUTS)
        gc.collect()
        flip_a_bit(own.blobs()[0])
        healed = session(source, provider, client)
        assert healed.epcache.outcome == "compiled", healed.epcache
        assert "damage" in healed.epcache.why
        assert equal(healed.run(None, INPUTS), want)
        assert session(source, provider, client).epcache.outcome == "hit"


def test_kill_and_restart(provider: Provider, own: Daemon, tmp_path: Path) -> None:
    """A session continues to work without the daemon, and its build is a hit after the restart."""
    source = make_model(tmp_path / "model.onnx", seed=7)
    with own.client() as client:
        held = session(source, provider, client)
        want = held.run(None, INPUTS)
        own.kill()
        assert equal(held.run(None, INPUTS), want)
        own.start()
        again = session(source, provider, client)
    assert again.epcache.outcome == "hit"
    assert equal(again.run(None, INPUTS), want)


def test_sessions_leave_no_descriptors(provider: Provider, shared: Daemon, tmp_path: Path) -> None:
    source = make_model(tmp_path / "model.onnx", seed=15)
    with shared.client() as client:
        session(source, provider, client)
        gc.collect()
        before = open_descriptors()
        for _ in range(20):
            session(source, provider, client).run(None, INPUTS)
        assert opened_since(before) == {}


def test_lease_is_seen_by_the_daemon(provider: Provider, own: Daemon, tmp_path: Path) -> None:
    source = make_model(tmp_path / "model.onnx", seed=16)
    with own.client() as client:
        held = session(source, provider, client)
        assert own.leases() == 1
        del held
        gc.collect()
        assert own.leases() == 0
