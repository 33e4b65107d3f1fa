"""Sessions on real execution providers, with a fake daemon or none."""

from __future__ import annotations

import gc
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ort = pytest.importorskip(
    "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
)

import epcache  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
from descriptors import open_descriptors  # noqa: E402
from epcache import _plugins, _session  # noqa: E402
from fake_daemon import FakeDaemon, Peer  # noqa: E402
from providers import (
    INPUTS,
    OPENVINO,
    PROVIDERS,
    QNN,
    Provider,
    compile_plain,
    equal,
    make_model,
    run_plain,
)  # noqa: E402
from test_client import answer  # noqa: E402


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> Provider:
    if reason := request.param.missing():
        pytest.skip(reason)
    return request.param


@pytest.fixture
def source(tmp_path: Path) -> str:
    return make_model(tmp_path / "model.onnx")


@pytest.fixture(autouse=True)
def without_daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keeps tests without their own daemon from using one of the machine's."""
    monkeypatch.setenv("EPCACHE_SOCKET", "/nowhere")
    monkeypatch.setattr(_session, "_default_client", None)
    yield
    gc.collect()


@pytest.fixture
def compiled(provider: Provider, source: str, tmp_path: Path) -> Path:
    """A view with the daemon's layout: the artefact is in an inner directory."""
    compile_plain(provider, source, tmp_path / "view" / "abc", "x_ctx.onnx")
    return tmp_path / "view"


def serves(view: Path, seen: list | None = None, **more: object) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        peer.hello()
        while True:
            request = peer.acquire()
            if seen is not None:
                inodes = [os.fstat(descriptor).st_ino for descriptor in peer.received]
                seen.append((request["acquire"], inodes))
            answer(peer, request, view, **more)

    return script


def client(daemon: FakeDaemon) -> epcache.Client:
    return epcache.Client(daemon.path, hello_limit=10)


def leases(view: Path) -> int:
    return list(open_descriptors().values()).count(str(view))


# Without a daemon.


def test_no_daemon_is_the_same_execution_provider_and_one_warning(
    provider: Provider, source: str
) -> None:
    with pytest.warns(
        epcache.EpcacheWarning, match="^no daemon: .*compiled in this process"
    ) as caught:
        session = epcache.InferenceSession(source, ep=provider.spec)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert session.get_providers()[0] == provider.name
    assert (session.epcache.outcome, session.epcache.cached) == ("no daemon", False)
    assert equal(session.run(None, INPUTS), run_plain(provider, source))


def test_suspended_daemon_delays_a_session_by_at_most_the_limit(
    provider: Provider, source: str, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(tmp_path / "s"))
        stopped.listen()
        with pytest.warns(epcache.EpcacheWarning, match="no answer in time"):
            session = epcache.InferenceSession(
                source, ep=provider.spec, client=epcache.Client(tmp_path / "s")
            )
    # 50 ms and a margin for a busy machine; a request would wait for minutes
    assert session.epcache.acquire_seconds < 10
    assert session.get_providers()[0] == provider.name


def test_client_false_does_not_ask_the_daemon(provider: Provider, source: str) -> None:
    session = epcache.InferenceSession(source, ep=provider.spec, client=False)
    assert session.epcache.outcome == "bypassed"
    assert equal(session.run(None, INPUTS), run_plain(provider, source))


def test_session_is_an_onnxruntime_session(provider: Provider, source: str) -> None:
    assert isinstance(
        epcache.InferenceSession(source, ep=provider.spec, client=False), ort.InferenceSession
    )


def test_model_in_memory(provider: Provider, source: str) -> None:
    session = epcache.InferenceSession(Path(source).read_bytes(), ep=provider.spec, client=False)
    assert equal(session.run(None, INPUTS), run_plain(provider, source))


def test_same_options_twice(provider: Provider, source: str) -> None:
    """A session does not add execution providers to the application's object."""
    options = epcache.SessionOptions()
    for _ in range(2):
        epcache.InferenceSession(source, options, ep=provider.spec, client=False)
    assert not options.has_providers()


def test_plain_options_are_bypassed_with_the_reason(provider: Provider, source: str) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    with pytest.warns(epcache.EpcacheWarning, match="bypassed: .*SessionOptions cannot be read"):
        session = epcache.InferenceSession(source, options, ep=provider.spec)
    assert session.get_providers()[0] == provider.name
    assert session.get_session_options().intra_op_num_threads == 1


def test_plain_options_with_devices(provider: Provider, source: str) -> None:
    with pytest.warns(epcache.EpcacheWarning, match="cannot be read"):
        session = epcache.InferenceSession(source, provider.plain_options())
    assert session.get_providers()[0] == provider.name


@pytest.mark.parametrize("entry", ["ep.share_ep_contexts", "ep.context_enable"])
def test_unsupported_options_make_a_plain_session(
    provider: Provider, source: str, entry: str, tmp_path: Path
) -> None:
    options = epcache.SessionOptions()
    options.add_session_config_entry(entry, "0")
    with pytest.warns(epcache.EpcacheWarning, match=f"bypassed: .*{entry}"):
        epcache.InferenceSession(source, options, ep=provider.spec)


def test_cpu_execution_provider_has_nothing_to_cache(source: str) -> None:
    with pytest.warns(epcache.EpcacheWarning, match="is built into this ONNX Runtime"):
        session = epcache.InferenceSession(source, ep="CPUExecutionProvider")
    assert session.run(None, INPUTS)[0].shape == (1, 64)


# An invalid request is an error, and never falls back to the CPU.


def test_missing_execution_provider_is_an_error(source: str) -> None:
    with pytest.raises(
        epcache.Unavailable, match="no installed package has the library of NoSuchExecutionProvider"
    ):
        epcache.InferenceSession(source, ep="NoSuchExecutionProvider")


def test_invalid_library_is_an_error(source: str) -> None:
    with pytest.raises(epcache.Unavailable, match="cannot load"):
        epcache.InferenceSession(
            source, ep=epcache.ExecutionProvider("NotALibrary", library=__file__)
        )


def test_missing_device_is_an_error(provider: Provider, source: str) -> None:
    with pytest.raises(epcache.Unavailable, match=r"no NPU on this machine; it lists CPU"):
        epcache.InferenceSession(source, ep=f"{provider.name}:NPU")
    with pytest.raises(
        epcache.Unavailable,
        match=r"no CPU \(device 0x1234, kind=x\) on this machine; "
        r"it lists CPU \(vendor .*, no kind\)",
    ):
        epcache.InferenceSession(source, ep=f"{provider.name}:CPU,device=0x1234,kind=x")


def test_onnxruntimes_fallback_is_off(
    provider: Provider,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By default its constructor prints a line and uses the CPU if an execution provider fails."""
    tried = []

    def fails(self: object, *arguments: object) -> None:
        self._fallback_providers = ["CPUExecutionProvider"]
        tried.append(arguments)
        raise RuntimeError("the execution provider failed")

    monkeypatch.setattr(ort.InferenceSession, "_create_inference_session", fails)
    with pytest.raises(RuntimeError, match="the execution provider failed"):
        epcache.InferenceSession(source, ep=provider.spec, client=False)
    assert len(tried) == 1
    assert "Falling back" not in capsys.readouterr().out


def test_invalid_model_is_onnxruntimes_error(provider: Provider, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"\x08no model at all")
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        epcache.InferenceSession(tmp_path / "bad.onnx", ep=provider.spec, client=False)


def test_missing_model_is_onnxruntimes_error(provider: Provider, tmp_path: Path) -> None:
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.NoSuchFile):
        epcache.InferenceSession(tmp_path / "missing.onnx", ep=provider.spec)


def test_unknown_argument_is_a_type_error(source: str) -> None:
    with pytest.raises(TypeError, match="InferenceSession has no parameter epp"):
        epcache.InferenceSession(source, epp="X")


def test_no_execution_provider_is_an_error(source: str) -> None:
    with pytest.raises(ValueError, match="no execution provider named"):
        epcache.InferenceSession(source)


def test_execution_providers_named_twice_are_an_error(provider: Provider, source: str) -> None:
    options = epcache.SessionOptions()
    options.add_provider_for_devices(
        [d for d in ort.get_ep_devices() if d.ep_name == provider.name][:1], {}
    )
    with pytest.raises(ValueError, match="named twice"):
        epcache.InferenceSession(source, options, ep=provider.spec)


# With a daemon.


def served(
    daemon: FakeDaemon, source: str, provider: Provider, options: object = None
) -> epcache.InferenceSession:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return epcache.InferenceSession(source, options, ep=provider.spec, client=client(daemon))


def test_artefact_is_loaded_through_its_descriptor(
    provider: Provider, source: str, compiled: Path
) -> None:
    with FakeDaemon(serves(compiled, compatibility="optimal", why="because")) as daemon:
        session = served(daemon, source, provider)
        assert (session.epcache.outcome, session.epcache.cached, session.epcache.why) == (
            "hit",
            True,
            "because",
        )
        assert session.epcache.path.startswith("/proc/self/fd/")
        assert session.epcache.path.endswith("/abc/x_ctx.onnx")
        assert session.get_providers()[0] == provider.name
        assert equal(
            session.run(None, INPUTS), run_plain(provider, compiled / "abc" / "x_ctx.onnx")
        )


def test_lease_lives_as_long_as_the_session(
    provider: Provider, source: str, compiled: Path
) -> None:
    with FakeDaemon(serves(compiled)) as daemon:
        session = served(daemon, source, provider)
        assert leases(compiled) == 1
        binding = session.io_binding()
        del session
        gc.collect()
        assert leases(compiled) == 1, "the binding still uses the session"
        del binding
        gc.collect()
        assert leases(compiled) == 0


def test_view_without_a_descriptor_is_loaded_by_path(
    provider: Provider, source: str, compiled: Path
) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        reply = {"outcome": "hit", "view": str(compiled), "graph": "abc/x_ctx.onnx"}
        peer.send({"request": peer.acquire()["request"], "acquire_reply": reply})

    with FakeDaemon(script) as daemon:
        session = served(daemon, source, provider)
    assert session.epcache.path == str(compiled / "abc" / "x_ctx.onnx")


def test_request_describes_this_process(provider: Provider, source: str, compiled: Path) -> None:
    seen: list = []
    options = epcache.SessionOptions()
    options.intra_op_num_threads = 2
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_free_dimension_override_by_name("batch", 1)
    with FakeDaemon(serves(compiled, seen)) as daemon:
        session = served(daemon, source, provider, options)
    assert session.get_session_options().intra_op_num_threads == 2
    ((request, inodes),) = seen
    assert request["eps"][0]["name"] == provider.name
    assert request["eps"][0]["options"] == provider.options
    assert [d["type"] for d in request["eps"][0]["devices"]] == ["CPU"]
    assert request["session_options"] == {"session.disable_quant_qdq": "1"}
    assert request["free_dimensions"] == {"batch": 1}
    assert request["graph_optimization_level"] == "basic"
    runtime = request["runtime"]
    assert (runtime["directory"], runtime["ort_version"]) == ("", ort.__version__)
    assert Path(runtime["ort_library"]).name.startswith("libonnxruntime.so.")
    (library,) = runtime["ep_libraries"]
    assert library["ep"] == provider.name
    assert inodes[library["fd"]] == os.stat(library["path"]).st_ino
    assert inodes[0] == os.stat(source).st_ino


def test_devices_named_by_the_options(provider: Provider, source: str, compiled: Path) -> None:
    seen: list = []
    options = epcache.SessionOptions()
    given = _plugins.plugin(epcache.ExecutionProvider(provider.name)).options(provider.options)
    options.add_provider_for_devices(
        [d for d in ort.get_ep_devices() if d.ep_name == provider.name][:1], given
    )
    with FakeDaemon(serves(compiled, seen)) as daemon:
        session = epcache.InferenceSession(source, options, client=client(daemon))
    assert session.epcache.cached
    assert seen[0][0]["eps"][0]["options"] == given
    assert seen[0][0]["eps"][0]["devices"][0]["type"] == "CPU"


def test_session_gets_the_options_of_the_answer(
    provider: Provider, source: str, compiled: Path
) -> None:
    more = {
        "session_options": {"session.disable_prepacking": "1"},
        "graph_optimization_level": "disable_all",
        "provider_options": {provider.name: {"entries": provider.options}},
    }
    with FakeDaemon(serves(compiled, **more)) as daemon:
        options = served(daemon, source, provider).get_session_options()
    assert options.get_session_config_entry("session.disable_prepacking") == "1"
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_DISABLE_ALL


def test_library_options_name_this_processes_libraries(source: str, tmp_path: Path) -> None:
    if reason := QNN.missing():
        pytest.skip(reason)
    compile_plain(QNN, source, tmp_path / "view" / "abc", "x_ctx.onnx")
    elsewhere = {
        QNN.name: {"entries": {**QNN.options, "backend_path": "/of/the/daemon/libQnnHtp.so"}}
    }
    with FakeDaemon(serves(tmp_path / "view", provider_options=elsewhere)) as daemon:
        assert served(daemon, source, QNN).epcache.cached


@pytest.mark.parametrize(
    "damage", ["graph is no model", "sidecar is missing", "directory is empty", "unknown level"]
)
def test_artefact_that_does_not_load_makes_a_plain_session(
    provider: Provider, source: str, compiled: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {}
    for file in (compiled / "abc").iterdir():
        if damage == "graph is no model" and file.suffix == ".onnx":
            file.write_bytes(b"\x08no model at all")
        elif (
            damage == "sidecar is missing" and file.suffix == ".bin"
        ) or damage == "directory is empty":
            file.unlink()
        elif damage == "unknown level":
            more = {"graph_optimization_level": "from a later version"}
    with FakeDaemon(serves(compiled, **more)) as daemon:
        with pytest.warns(
            epcache.EpcacheWarning, match="failed: the compiled model does not load"
        ) as caught:
            session = epcache.InferenceSession(source, ep=provider.spec, client=client(daemon))
        assert len(caught) == 1
        assert session.epcache.outcome == "failed"
        assert session.get_providers()[0] == provider.name
        assert equal(session.run(None, INPUTS), run_plain(provider, source))
        assert leases(compiled) == 0, "what does not load is not kept"
    assert "Falling back" not in capsys.readouterr().out


def fails_with(**error: object) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        peer.hello()
        peer.send({"request": peer.acquire()["request"], "error": error})

    return script


@pytest.mark.parametrize("number", [1, 3, 4, 7, 9, 11, 12])
def test_any_error_makes_a_plain_session(provider: Provider, source: str, number: int) -> None:
    with FakeDaemon(fails_with(**{"class": number, "text": "sorry", "hint": "h"})) as daemon:
        with pytest.warns(epcache.EpcacheWarning, match=r"failed: sorry \(h\)"):
            session = epcache.InferenceSession(source, ep=provider.spec, client=client(daemon))
    assert equal(session.run(None, INPUTS), run_plain(provider, source))


def test_daemon_that_rebuilds_its_index_makes_a_plain_session(
    provider: Provider, source: str
) -> None:
    def starting(peer: Peer) -> None:
        peer.read()
        peer.send(
            {"request": 0, "error": {"class": 11, "text": "the daemon is starting: 7 builds, 3 %"}}
        )
        peer.wait_for_end()

    with FakeDaemon(starting) as daemon:
        with pytest.warns(epcache.EpcacheWarning, match="the daemon is starting: 7 builds, 3 %"):
            session = epcache.InferenceSession(source, ep=provider.spec, client=client(daemon))
    assert equal(session.run(None, INPUTS), run_plain(provider, source))


@pytest.mark.parametrize(
    ("why", "raises"),
    [
        ({"reason": "crash", "signal": "SIGSEGV"}, True),
        ({"reason": "crash", "exit": "1"}, True),
        ({"reason": "worker died", "signal": "SIGKILL"}, False),
        ({"reason": "refused", "code": "1"}, False),
        ({}, False),
    ],
)
def test_model_that_crashes_the_compiler_does_not_crash_the_application(
    source: str, why: dict, raises: bool
) -> None:
    error = {"class": 3, "text": "worker crashed", "facts": why}
    if reason := OPENVINO.missing():
        pytest.skip(reason)
    with FakeDaemon(fails_with(**error)) as daemon, warnings.catch_warnings():
        warnings.simplefilter("ignore", epcache.EpcacheWarning)
        if raises:
            with pytest.raises(epcache.CompileFailed, match="worker crashed"):
                epcache.InferenceSession(source, ep=OPENVINO.spec, client=client(daemon))
        else:
            assert (
                epcache.InferenceSession(
                    source, ep=OPENVINO.spec, client=client(daemon)
                ).epcache.outcome
                == "failed"
            )


def test_daemon_that_exits_during_the_request_makes_a_plain_session(
    provider: Provider, source: str
) -> None:
    def dies(peer: Peer) -> None:
        peer.hello()
        peer.acquire()

    with FakeDaemon(dies) as daemon:
        with pytest.warns(epcache.EpcacheWarning, match="no daemon"):
            session = epcache.InferenceSession(source, ep=provider.spec, client=client(daemon))
    assert session.get_providers()[0] == provider.name


def test_compiled_model_is_passed_through(provider: Provider, compiled: Path) -> None:
    graph = str(compiled / "abc" / "x_ctx.onnx")

    def script(peer: Peer) -> None:
        peer.hello()
        peer.send(
            {
                "request": peer.acquire()["request"],
                "acquire_reply": {"outcome": "passthrough", "compatibility": "optimal"},
            }
        )

    with FakeDaemon(script) as daemon:
        session = served(daemon, graph, provider)
    assert (session.epcache.outcome, session.epcache.path) == ("passthrough", graph)
    assert equal(session.run(None, INPUTS), run_plain(provider, graph))


def test_external_initializers_are_passed_in_memory_without_path_access(
    provider: Provider, source: str, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without access to the daemon's directories ONNX Runtime gets the files in memory."""
    graph, rest = compiled / "abc" / "x_ctx.onnx", compiled / "abc" / "rest.bin"
    doubled(graph, rest)
    load, tried = epcache.InferenceSession._load, []

    def unreachable(self: epcache.InferenceSession, path: str, options: object) -> None:
        tried.append(path)
        if len(tried) == 1:
            raise RuntimeError(
                "[ONNXRuntimeError] : 1 : FAIL : weakly canonical path ... Permission denied"
            )
        rest.rename(compiled / "gone")
        load(self, path, options)

    monkeypatch.setattr(epcache.InferenceSession, "_load", unreachable)
    files = [
        {"name": f"abc/{f.name}", "size": f.stat().st_size, "digest": ""}
        for f in sorted((compiled / "abc").iterdir())
    ]
    with FakeDaemon(serves(compiled, files=files)) as daemon:
        session = served(daemon, source, provider)
    assert session.epcache.cached
    assert (
        len(tried) == 2 and set(tried) == {session.epcache.path} and tried[0].startswith("/proc/")
    )
    plain = run_plain(provider, source)
    assert equal(session.run(None, INPUTS), [2 * output for output in plain])


def doubled(graph: Path, rest: Path) -> None:
    """Doubles the first output of a compiled model, by a node that is not compiled and has its
    weight in a file.
    """
    model = onnx.load(graph)
    output = model.graph.output[0]
    name = output.name  # because OpenVINO looks for this name
    model.graph.value_info.add(name=name, type=output.type)
    output.name = "doubled"
    rest.write_bytes(np.full(4096, 2, np.float32).tobytes())
    two = onnx.TensorProto(
        name="two",
        data_type=onnx.TensorProto.FLOAT,
        dims=[4096],
        data_location=onnx.TensorProto.EXTERNAL,
    )
    for key, value in {"location": rest.name, "offset": "0", "length": str(4 * 4096)}.items():
        two.external_data.add(key=key, value=value)
    model.graph.initializer.append(two)
    model.graph.node.add(
        op_type="ReduceMax", input=["two"], output=["scale"], name="largest"
    ).attribute.add(name="keepdims", type=onnx.AttributeProto.INT, i=0)
    model.graph.node.add(op_type="Mul", input=[name, "scale"], output=[output.name], name="double")
    onnx.save(model, graph)


def test_external_initializers_are_loaded_by_the_views_path(
    provider: Provider, source: str, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imitates ONNX Runtime's error for a user without access to the daemon's directories; see
    test_daemon for the real one.
    """
    load, tried = epcache.InferenceSession._load, []

    def refuses_descriptors(self: epcache.InferenceSession, path: str, options: object) -> None:
        tried.append(path)
        if path.startswith("/proc/"):
            raise RuntimeError(
                "[ONNXRuntimeError] : 1 : FAIL : weakly canonical path ... Permission denied"
            )
        load(self, path, options)

    monkeypatch.setattr(epcache.InferenceSession, "_load", refuses_descriptors)
    with FakeDaemon(serves(compiled)) as daemon:
        session = served(daemon, source, provider)
    assert session.epcache.cached
    assert session.epcache.path == str(compiled / "abc" / "x_ctx.onnx")
    assert len(tried) == 3, "by descriptor, then with the files besides, then by name"


def test_set_providers_loads_the_source_model(
    provider: Provider, source: str, compiled: Path
) -> None:
    with FakeDaemon(serves(compiled)) as daemon:
        session = served(daemon, source, provider)
        session.set_providers(["CPUExecutionProvider"])
        assert session.get_providers() == ["CPUExecutionProvider"]
        cpu = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
        assert equal(session.run(None, INPUTS), cpu.run(None, INPUTS))
        gc.collect()
        assert leases(compiled) == 0


def test_progress_reaches_the_application(provider: Provider, source: str, compiled: Path) -> None:
    def script(peer: Peer) -> None:
        peer.hello()
        request = peer.acquire()
        peer.send({"request": request["request"], "progress": {"phase": "compiling"}})
        answer(peer, request, compiled, outcome="compiled")

    seen = []
    with FakeDaemon(script) as daemon:
        session = epcache.InferenceSession(
            source, ep=provider.spec, client=client(daemon), progress=seen.append
        )
    assert [p.phase for p in seen] == ["compiling"]
    assert session.epcache.outcome == "compiled"


def test_times_are_measured(provider: Provider, source: str, compiled: Path) -> None:
    started = time.perf_counter()
    with FakeDaemon(serves(compiled, compile_seconds=2.5)) as daemon:
        report = served(daemon, source, provider).epcache
    assert 0 < report.load_seconds and 0 < report.acquire_seconds
    assert report.load_seconds + report.acquire_seconds <= time.perf_counter() - started
    assert report.compile_seconds == 2.5


def test_sessions_leave_no_descriptors(provider: Provider, source: str, compiled: Path) -> None:
    with FakeDaemon(serves(compiled)) as daemon:
        asked = client(daemon)
        epcache.InferenceSession(source, ep=provider.spec, client=asked).run(None, INPUTS)
        gc.collect()
        before = len(open_descriptors())
        for _ in range(20):
            output = epcache.InferenceSession(source, ep=provider.spec, client=asked).run(
                None, INPUTS
            )
            assert np.isfinite(output[0]).all()
        gc.collect()
        # The fake daemon, in this process, keeps what it received: the model and the library.
        assert len(open_descriptors()) - before == 20 * 2
