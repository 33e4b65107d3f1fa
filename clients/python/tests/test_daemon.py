"""Sessions from the real daemon, on real execution providers and real models."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import daemon as real
import pytest

ort = pytest.importorskip("onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes")

import epcache  # noqa: E402
import inputs  # noqa: E402
from conftest import HERE, PROJECT, RUNTIMES, open_descriptors  # noqa: E402
from daemon import Daemon, flip_a_byte  # noqa: E402
from providers import INPUTS, OPENVINO, PROVIDERS, QNN, Provider, compile_plain, equal, make_model, run_plain  # noqa: E402

pytestmark = pytest.mark.skipif(bool(real.missing()), reason=real.missing() or "-")

MODELS = Path(os.environ.get("EPCACHED_MODELS") or "/nonexistent")


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> Provider:
    if reason := request.param.missing():
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """A daemon for the tests that do not mind what others have stored."""
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
    """A session that quietly was not made from the cache would pass most of these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    gc.collect()


def session(source: str, provider: Provider, client: epcache.Client, dims: dict | None = None, **more: object):
    options = epcache.SessionOptions()
    for name, size in (dims or {}).items():
        options.add_free_dimension_override_by_name(name, size)
    return epcache.InferenceSession(source, options, ep=provider.spec, client=client, **more)


def test_compiled_once_then_hit(provider: Provider, shared: Daemon, tmp_path: Path) -> None:
    source = make_model(tmp_path / "model.onnx", seed=1)
    with shared.client() as client:
        first, second = session(source, provider, client), session(source, provider, client)
    assert (first.epcache.outcome, second.epcache.outcome) == ("compiled", "hit")
    assert first.epcache.compatibility == second.epcache.compatibility == "optimal"
    assert first.epcache.build == second.epcache.build
    assert equal(first.run(None, INPUTS), second.run(None, INPUTS))


REAL_MODELS = ["silero-vad", "tiny-convolution", "tiny-external", "tiny-free-dimension"]
# Without the device QNN computes in a simulator: seconds for these.
SLOW_ON_QNN = ["magika", "minilm-int8"]
PAIRS = [(OPENVINO, name) for name in REAL_MODELS + SLOW_ON_QNN] + [(QNN, name) for name in REAL_MODELS]


@pytest.mark.parametrize("embed", [False, True], ids=["sidecar", "embedded"])
@pytest.mark.parametrize(("provider", "name"), PAIRS, ids=[f"{p.package}-{name}" for p, name in PAIRS], indirect=["provider"])
def test_outputs_are_those_of_plain_onnxruntimes_artefact(
    provider: Provider, shared: Daemon, tmp_path: Path, name: str, embed: bool
) -> None:
    if not (MODELS / "models.json").exists():
        pytest.skip("EPCACHED_MODELS names no folder with models.json, see testdata/fetch-models")
    (model,) = [m for m in json.loads((MODELS / "models.json").read_text())["models"] if m["name"] == name]
    source, feeds, dims = str(MODELS / model["path"]), inputs.make(model), model["dimensions"]

    plain_options = provider.plain_options()
    for dimension, size in dims.items():
        plain_options.add_free_dimension_override_by_name(dimension, size)
    basic = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    compiler = ort.ModelCompiler(plain_options, source, embed_compiled_data_into_model=embed, graph_optimization_level=basic)
    compiler.compile_to_file(str(tmp_path / "x_ctx.onnx"))
    plain = ort.InferenceSession(str(tmp_path / "x_ctx.onnx"), plain_options, enable_fallback=0)
    uncompiled = ort.InferenceSession(source, plain_options, enable_fallback=0)

    with shared.client() as client:
        served = session(source, provider, client, dims, embed=embed)
    assert served.epcache.cached
    outputs = served.run(None, feeds)
    assert equal(outputs, plain.run(None, feeds))
    # Not by equality: execution providers round compiled forms in their own way. Half precision is QNN's.
    tolerance = 1e-4 if "OpenVINO" in provider.name else 5e-3
    for got, want in zip(outputs, uncompiled.run(None, feeds)):
        assert abs(got - want).max() <= tolerance * max(1e-9, abs(want).max())


def test_files_are_where_the_answer_says(provider: Provider, shared: Daemon, tmp_path: Path) -> None:
    source = make_model(tmp_path / "model.onnx", seed=2)
    with shared.client() as client, client.acquire(source, provider.spec, runtime=runtime_of(provider)) as artefact:
        assert artefact.fd is not None
        for file in artefact.files:
            through_descriptor = Path(artefact.path).parent / Path(file.name).name
            assert through_descriptor.stat().st_size == file.size
        assert equal(run_plain(provider, artefact.path), run_plain(provider, artefact.view_path))


def runtime_of(provider: Provider) -> epcache.Runtime:
    from epcache import _plugins

    return _plugins.runtime([_plugins.plugin(epcache.ExecutionProvider(provider.name))])


def test_content_is_what_counts(provider: Provider, shared: Daemon, tmp_path: Path) -> None:
    """Another path, name, owner or time: the same entry. One weight, one option: another."""

    def key(source: object, ep: object = None, **more: object) -> str:
        runtime = runtime_of(provider)
        return client.acquire(source, ep or provider.spec, on_miss="key_only", runtime=runtime, **more).request_key

    source = make_model(tmp_path / "model.onnx", seed=3)
    moved = tmp_path / "elsewhere" / "other name.onnx"
    moved.parent.mkdir()
    moved.write_bytes(Path(source).read_bytes())
    os.utime(moved, (1, 1))
    backwards = (provider.spec[0], dict(reversed(provider.options.items())))
    with shared.client() as client:
        keys = [key(source), key(moved), key(Path(source).read_bytes()), key(source, backwards)]
        assert len(set(keys)) == 1
        others = [
            key(make_model(tmp_path / "weight.onnx", seed=4)),
            key(source, embed=True),
            key(source, session_options={"session.disable_quant_qdq": "1"}),
            key(source, dims={"batch": 1}),
        ]
        assert len({keys[0], *others}) == 5


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        pytest.param({"model": b"\x08no model at all"}, epcache.BadModel, id="not ONNX"),
        pytest.param({"eps": "NoSuchExecutionProvider"}, epcache.Unavailable, id="unknown execution provider"),
        pytest.param({"eps": ("{ep}", {"no_such_option": "1"})}, epcache.BadRequest, id="unknown option"),
        pytest.param({"session_options": {"ep.context_file_path": "/tmp/x"}}, epcache.NotAllowed, id="option that writes"),
        pytest.param({"on_miss": "fail"}, epcache.NotFound, id="not compiled, and not to be"),
        pytest.param({"eps": "{ep}:NPU"}, epcache.Unavailable, id="no such device"),
    ],
)
def test_refusals(provider: Provider, shared: Daemon, tmp_path: Path, ask: dict, kind: type[epcache.Error]) -> None:
    arguments = {"model": make_model(tmp_path / "refused.onnx", seed=5), "eps": provider.spec, **ask}
    if isinstance(arguments["eps"], str):
        arguments["eps"] = arguments["eps"].replace("{ep}", provider.name)
    elif arguments["eps"][0] == "{ep}":
        arguments["eps"] = (provider.name, arguments["eps"][1])
    with shared.client() as client:
        with pytest.raises(kind) as caught:
            client.acquire(**arguments)
        assert type(caught.value) is kind
        client.acquire(make_model(tmp_path / "model.onnx", seed=1), provider.spec).close()  # it lives


def test_damage_is_never_served_and_heals(provider: Provider, own: Daemon, tmp_path: Path) -> None:
    source = make_model(tmp_path / "model.onnx", seed=6)
    with own.client() as client:
        want = session(source, provider, client).run(None, INPUTS)
        gc.collect()
        flip_a_byte(own.blobs()[0])
        healed = session(source, provider, client)
        assert healed.epcache.outcome == "compiled", healed.epcache
        assert "damage" in healed.epcache.why
        assert equal(healed.run(None, INPUTS), want)
        assert session(source, provider, client).epcache.outcome == "hit"


def test_kill_and_restart(provider: Provider, own: Daemon, tmp_path: Path) -> None:
    """A session goes on without the daemon, and what was answered is there after it."""
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


def test_daemon_that_is_stopped(provider: Provider, own: Daemon, tmp_path: Path) -> None:
    source = make_model(tmp_path / "model.onnx", seed=8)
    assert own.process is not None
    own.process.send_signal(signal.SIGSTOP)
    try:
        with warnings.catch_warnings(), epcache.Client(own.socket) as client:
            warnings.simplefilter("ignore", epcache.EpcacheWarning)
            made = session(source, provider, client)
    finally:
        own.process.send_signal(signal.SIGCONT)
    assert made.epcache.outcome == "no daemon"
    assert made.epcache.acquire_seconds < 0.5
    assert equal(made.run(None, INPUTS), run_plain(provider, source))


@pytest.mark.parametrize("by", ["descriptor", "path"])
def test_every_output_is_its_own_models(provider: Provider, own: Daemon, tmp_path: Path, by: str) -> None:
    """Twenty models of one shape in one process: execution providers cache by path, and descriptor numbers come back.

    What is computed must be the model's own, whatever was loaded, kept, dropped, damaged and healed before.
    """
    # Every load of a QNN context costs many times one of OpenVINO's, which is also the one that caches by path.
    cycles = 80 if "QNN" in provider.name and not OPENVINO.missing() else 200
    numbers = random.Random(11)
    sources = [make_model(tmp_path / f"{number}.onnx", seed=100 + number) for number in range(20)]
    wants = [run_plain(provider, compile_plain(provider, source, tmp_path / f"plain{n}")) for n, source in enumerate(sources)]
    assert len({want[0].tobytes() for want in wants}) == 20
    kept: list[tuple[int, object]] = []
    options = epcache.SessionOptions()
    outcomes = []
    with own.client() as client:
        for cycle in range(cycles):
            number = numbers.randrange(20)
            if cycle in (cycles // 3, cycles * 2 // 3):
                flip_a_byte(own.blobs()[0])
            if by == "descriptor":
                made = epcache.InferenceSession(sources[number], options, ep=provider.spec, client=client)
                outcomes.append(made.epcache.outcome)
            else:
                with client.acquire(sources[number], provider.spec, runtime=runtime_of(provider)) as artefact:
                    made = ort.InferenceSession(artefact.view_path, provider.plain_options(), enable_fallback=0)
                    outcomes.append(artefact.outcome)
            assert equal(made.run(None, INPUTS), wants[number]), f"cycle {cycle}: another model's output"
            if numbers.random() < 0.3:
                kept.append((number, made))
            if len(kept) > 8:
                kept.pop(numbers.randrange(len(kept)))
            del made
            for held, kept_session in numbers.sample(kept, min(2, len(kept))):
                assert equal(kept_session.run(None, INPUTS), wants[held]), f"cycle {cycle}: a kept session changed"
    assert len(outcomes) - outcomes.count("hit") <= 22, "two were damaged, the others compiled once"


# In processes of their own.


def run_python(code: str, runtime: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    (folder,) = [path for path in RUNTIMES if path.name == runtime]
    path = os.pathsep.join(map(str, [HERE, HERE.parent, PROJECT / "testdata", folder]))
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "error::RuntimeWarning", **environment}
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.strip().splitlines()[-1])


RUN_ONCE = """
    import json, sys
    import epcache, onnxruntime
    from providers import INPUTS, OPENVINO, QNN
    provider = {"OpenVINOExecutionProvider": OPENVINO, "QNNExecutionProvider": QNN}[sys.argv[2]]
    session = epcache.InferenceSession(sys.argv[1], ep=provider.spec, client=epcache.Client(sys.argv[3], hello_limit=10))
    result = {"outcome": session.epcache.outcome, "build": session.epcache.build, "ort": onnxruntime.__version__}
    result["output"] = session.run(None, INPUTS)[0].tobytes().hex()
    print(json.dumps(result))
"""

RUNTIME_OF = {"OpenVINOExecutionProvider": "openvino-1.8.1", "QNNExecutionProvider": "qnn-2.7.0"}


def test_eight_processes_ask_at_once(provider: Provider, own: Daemon, tmp_path: Path) -> None:
    source = make_model(tmp_path / "model.onnx", seed=9)
    processes = [run_python(RUN_ONCE, RUNTIME_OF[provider.name], source, provider.name, own.socket) for _ in range(8)]
    results = [finish(process) for process in processes]
    outcomes = sorted(result["outcome"] for result in results)
    assert outcomes.count("compiled") == 1, outcomes
    assert set(outcomes) <= {"compiled", "waited", "hit"}
    assert len({result["output"] for result in results}) == 1


def test_two_onnxruntimes_share_a_build(shared: Daemon, tmp_path: Path) -> None:
    """The same execution provider library under ONNX Runtime 1.28.0 and 1.31.1: one compile."""
    names = ["openvino-1.8.1-ort-1.28.0", "openvino-1.8.1"]
    if missing := set(names) - {path.name for path in RUNTIMES}:
        pytest.skip(f"EPCACHED_RUNTIMES lacks {', '.join(missing)}")
    if reason := OPENVINO.missing():
        pytest.skip(reason)
    source = make_model(tmp_path / "model.onnx", seed=10)
    results = [finish(run_python(RUN_ONCE, name, source, "OpenVINOExecutionProvider", shared.socket)) for name in names]
    assert [result["ort"] for result in results] == ["1.28.0", "1.31.1"]
    assert [result["outcome"] for result in results] == ["compiled", "hit"]
    assert results[0]["build"] == results[1]["build"]
    assert results[0]["output"] == results[1]["output"]


AS_ANOTHER_USER = """
    import json, os, sys
    import epcache, onnxruntime
    from epcache import _model, _plugins
    from providers import INPUTS, OPENVINO, QNN
    provider = {"OpenVINOExecutionProvider": OPENVINO, "QNNExecutionProvider": QNN}[sys.argv[2]]
    _plugins.plugin(epcache.ExecutionProvider(provider.name))  # while the libraries' folders can be read for sure
    import multiprocessing, glob  # so that nothing has to be imported later
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    session = epcache.InferenceSession(sys.argv[1], ep=provider.spec, client=epcache.Client(sys.argv[3], hello_limit=10))
    result = {"outcome": session.epcache.outcome, "output": session.run(None, INPUTS)[0].tobytes().hex(), "reached": []}
    fd = int(session.epcache.path.split("/")[4])
    view = os.readlink(f"/proc/self/fd/{fd}")
    def reach(how, *arguments, **named):
        try:
            how(*arguments, **named)
        except OSError:
            return
        result["reached"].append([str(a) for a in arguments])
    reach(os.listdir, f"/proc/self/fd/{fd}/..")
    reach(os.open, "..", os.O_RDONLY, dir_fd=fd)
    parent = os.open("..", os.O_PATH, dir_fd=fd)  # anybody may have this; it opens nothing
    reach(os.listdir, os.path.dirname(view))
    reach(os.listdir, view)
    for sibling in sys.argv[4:]:
        reach(os.listdir, sibling)
        reach(os.open, sibling, os.O_RDONLY)
        reach(os.listdir, f"/proc/self/fd/{fd}/../{os.path.basename(sibling)}")
        reach(os.open, "../" + os.path.basename(sibling), os.O_RDONLY, dir_fd=fd)
        reach(os.open, os.path.basename(sibling), os.O_PATH, dir_fd=parent)
    reach(os.open, "new", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
    print(json.dumps(result))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_loads_through_the_descriptor_and_sees_nothing_else(provider: Provider, own: Daemon, tmp_path: Path) -> None:
    # Not in pytest's folder, which is closed to others.
    source = make_model(own.folder / "model.onnx", seed=12)
    private = make_model(tmp_path / "private.onnx", seed=13)
    os.chmod(source, 0o644)
    os.chmod(private, 0o600)
    with own.client() as client:
        want = session(source, provider, client).run(None, INPUTS)
        siblings = []
        for model in (private, make_model(tmp_path / "other.onnx", seed=14)):
            with client.acquire(model, provider.spec, runtime=runtime_of(provider)) as artefact:
                siblings.append(artefact.view)
    result = finish(run_python(AS_ANOTHER_USER, RUNTIME_OF[provider.name], source, provider.name, own.socket, *siblings))
    assert result["outcome"] == "hit"
    assert result["output"] == want[0].tobytes().hex()
    assert result["reached"] == []


def test_sessions_leave_no_descriptors(provider: Provider, shared: Daemon, tmp_path: Path) -> None:
    source = make_model(tmp_path / "model.onnx", seed=15)
    with shared.client() as client:
        session(source, provider, client)
        gc.collect()
        before = open_descriptors()
        for _ in range(20):
            session(source, provider, client).run(None, INPUTS)
        gc.collect()
        assert set(open_descriptors()) == set(before)
