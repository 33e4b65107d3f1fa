"""Execution providers by ONNX Runtime's own arguments `providers` and `provider_options`, and
built-in ones.
"""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ort = pytest.importorskip(
    "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
)

import epcache  # noqa: E402
from epcache import _machine, _plugins, _providers, _session  # noqa: E402
from epcache._run import _requested, _settings  # noqa: E402
from fake_daemon import FakeDaemon  # noqa: E402
from openvino_model import source, view  # noqa: E402, F401
from providers import INPUTS, OPENVINO, equal, make_model, run_plain  # noqa: E402
from test_session import client, serves  # noqa: E402

CPU = "CPUExecutionProvider"
NOWHERE = "NoSuchExecutionProvider"


@pytest.fixture(autouse=True)
def without_daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("EPCACHE_SOCKET", "/nowhere")
    monkeypatch.setattr(_session, "_default_client", None)
    yield
    gc.collect()


NAMED = [
    pytest.param({"providers": [(OPENVINO.name, OPENVINO.options)]}, id="pair"),
    pytest.param(
        {"providers": [OPENVINO.name], "provider_options": [OPENVINO.options]}, id="options beside"
    ),
    pytest.param({"providers": [(OPENVINO.name, OPENVINO.options), CPU]}, id="and the CPU"),
    pytest.param(
        {"providers": [OPENVINO.name, CPU], "provider_options": [OPENVINO.options, {}]},
        id="options of both",
    ),
    pytest.param({"providers": [(OPENVINO.name, OPENVINO.options), OPENVINO.name]}, id="twice"),
    pytest.param(
        {"providers": [(OPENVINO.name, {**OPENVINO.options, "device_type": "CPU"})]},
        id="device as an option",
    ),
]


@pytest.mark.parametrize("named", NAMED)
def test_providers_are_equivalent_to_ep(source: str, view: Path, named: dict[str, Any]) -> None:
    seen: list = []
    with FakeDaemon(serves(view, seen)) as daemon, warnings.catch_warnings():
        warnings.simplefilter("error")
        by_name = epcache.InferenceSession(source, client=client(daemon), **named)
        epcache.InferenceSession(source, client=client(daemon), ep=OPENVINO.name)
    assert by_name.epcache.cached
    assert by_name.get_providers()[0] == OPENVINO.name
    (asked, _), (by_ep, _) = seen
    assert [ep["name"] for ep in asked["eps"]] == [OPENVINO.name]
    assert asked["eps"][0]["options"] == OPENVINO.options
    if "device_type" in str(named):
        assert [device["type"] for device in asked["eps"][0]["devices"]] == ["CPU"]
    else:
        assert asked["eps"][0]["devices"] == by_ep["eps"][0]["devices"]


def test_positional_parameters_are_those_of_onnxruntime(source: str) -> None:
    session = epcache.InferenceSession(
        source, epcache.SessionOptions(), [OPENVINO.name], [OPENVINO.options], client=False
    )
    assert session.get_providers()[0] == OPENVINO.name
    assert equal(session.run(None, INPUTS), run_plain(OPENVINO, source))


def test_missing_provider_is_skipped_with_one_warning(source: str, view: Path) -> None:
    with (
        FakeDaemon(serves(view)) as daemon,
        pytest.warns(epcache.EpcacheWarning, match=f"library of {NOWHERE}") as caught,
    ):
        session = epcache.InferenceSession(
            source, providers=[NOWHERE, OPENVINO.spec, CPU], client=client(daemon)
        )
    assert len(caught) == 1
    assert session.epcache.cached
    assert session.get_providers()[0] == OPENVINO.name
    assert NOWHERE in session.epcache.warnings[0]


@pytest.mark.parametrize("more", [{}, {"client": False}], ids=["no daemon", "no client"])
@pytest.mark.parametrize("names", [[NOWHERE, CPU], [NOWHERE]], ids=["and the CPU", "alone"])
def test_providers_that_are_all_missing_are_left_to_onnxruntime(
    source: str, names: list[str], more: dict[str, Any]
) -> None:
    with pytest.warns() as caught:
        session = epcache.InferenceSession(source, providers=names, **more)
    assert session.get_providers() == [CPU]
    own = [str(w.message) for w in caught if issubclass(w.category, epcache.EpcacheWarning)]
    assert len(own) == (0 if more else 1)
    assert all(text.startswith("bypassed: ") and NOWHERE in text for text in own)
    assert [w for w in caught if "not in available provider names" in str(w.message)]


class Broken:
    """ONNX Runtime with a built-in execution provider that has no device, as CUDA's package has on
    a machine without a GPU.
    """

    NAME = "BrokenExecutionProvider"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # A module's name for ONNX Runtime's own check of the names, and an error for its use.
        available = [self.NAME, *ort.get_available_providers()]
        monkeypatch.setattr(ort, "get_available_providers", lambda: available)
        collection = importlib.import_module(ort.InferenceSession.__module__)
        monkeypatch.setattr(collection.C, "get_available_providers", lambda: available)
        plain = ort.SessionOptions.add_provider

        def add_provider(options: Any, name: str, settings: Any) -> None:
            if name == self.NAME:
                raise RuntimeError("no driver")
            plain(options, name, settings)

        monkeypatch.setattr(ort.SessionOptions, "add_provider", add_provider)


@pytest.mark.parametrize("more", [{}, {"client": False}], ids=["no daemon", "no client"])
@pytest.mark.parametrize("first", [[], [NOWHERE]], ids=["", "beside a missing one"])
def test_built_in_provider_without_its_device_falls_back_as_in_onnxruntime(
    source: str, monkeypatch: pytest.MonkeyPatch, first: list[str], more: dict[str, Any]
) -> None:
    Broken(monkeypatch)
    names = [*first, (Broken.NAME, {"device_id": 0}), CPU]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = epcache.InferenceSession(source, providers=names, **more)
        assert session.get_providers() == [CPU]
        beside = epcache.InferenceSession(
            source, providers=[OPENVINO.name, Broken.NAME, CPU], **more
        )
        assert beside.epcache.outcome == "bypassed"
        assert beside.get_providers() == [CPU]
        with pytest.raises(Exception, match="Unknown Provider Type"):
            epcache.InferenceSession(source, providers=names, enable_fallback=0, **more)


def test_cpu_as_first_provider_is_plain(source: str) -> None:
    with pytest.warns(
        epcache.EpcacheWarning, match=f"bypassed: {CPU} is built into this ONNX Runtime"
    ):
        session = epcache.InferenceSession(source, providers=[CPU, OPENVINO.name])
    assert session.get_providers()[0] == CPU


def test_built_in_provider_without_devices(source: str) -> None:
    """Like CUDA's; the CPU's is on every machine."""
    if "AzureExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has no execution provider that lists no devices")
    with pytest.warns(
        epcache.EpcacheWarning,
        match="bypassed: AzureExecutionProvider is built into this ONNX Runtime",
    ):
        session = epcache.InferenceSession(source, ep=[OPENVINO.spec, "AzureExecutionProvider"])
    assert session.get_providers() == [OPENVINO.name, "AzureExecutionProvider", CPU]
    with pytest.raises(epcache.Unavailable, match="omit the device"):
        epcache.InferenceSession(source, ep="AzureExecutionProvider:GPU")


def test_names_override_the_devices_of_the_options(source: str) -> None:
    options = epcache.SessionOptions()
    options.add_provider_for_devices(
        [d for d in ort.get_ep_devices() if d.ep_name == OPENVINO.name][:1], {}
    )
    with pytest.warns() as caught:
        session = epcache.InferenceSession(source, options, providers=[CPU])
    assert session.get_providers() == [CPU]
    (ours,) = [str(w.message) for w in caught if issubclass(w.category, epcache.EpcacheWarning)]
    assert ours.startswith(
        "bypassed: execution providers are named by providers=, and in the session options as well"
    )


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ({"ep": OPENVINO.name, "providers": [CPU]}, "named twice"),
        ({"providers": [CPU], "provider_options": []}, ""),
        (
            {"providers": [CPU], "provider_options": [{}, {}]},
            "1 names, but provider_options 2 entries",
        ),
        ({"providers": [(CPU, {"a": "1"})], "provider_options": [{"b": "1"}]}, "given twice"),
        ({"providers": CPU}, "a list of names"),
        ({"provider_options": [{}]}, "without providers"),
        (
            {"ep": f"{OPENVINO.name}:CPU", "provider_options": [{"num_of_threads": "1"}]},
            r"write the options into it: ep=\('OpenVINOExecutionProvider:CPU', "
            r"{'num_of_threads': '1'}\)",
        ),
        ({"ep": OPENVINO.name, "on_miss": "key_only"}, "must be one of wait, background"),
        ({}, "no execution provider named"),
    ],
)
def test_invalid_providers_are_errors(source: str, named: dict[str, Any], why: str) -> None:
    if not why:
        assert epcache.InferenceSession(source, client=False, **named).get_providers() == [CPU]
        return
    with pytest.raises(ValueError, match=why):
        epcache.InferenceSession(source, **named)


@pytest.mark.parametrize(
    ("value", "device"),
    [
        ("GPU", epcache.Device("GPU")),
        ("npu", epcache.Device("NPU")),
        ("GPU.1", epcache.Device("GPU", metadata={"ov_device": "GPU.1"})),
    ],
)
def test_openvinos_device_type(value: str, device: epcache.Device) -> None:
    """As a plugin it ignores that option, and would run on the first device."""
    asked = epcache.ExecutionProvider(
        OPENVINO.name, options={"device_type": value, "precision": "FP32"}
    )
    assert _plugins._device_of_option(asked) == epcache.ExecutionProvider(
        OPENVINO.name, (device,), {"precision": "FP32"}
    )


def test_unknown_device_type_is_an_error(source: str) -> None:
    with pytest.raises(epcache.Unavailable, match="has no device 'HETERO:GPU,CPU'.*AUTO"):
        epcache.InferenceSession(
            source, providers=[(OPENVINO.name, {"device_type": "HETERO:GPU,CPU"})]
        )


@pytest.mark.parametrize("function", [epcache.why, epcache.warm, epcache.compile])
def test_options_beside_ep_are_refused_by_every_function(
    source: str, tmp_path: Path, function: Any
) -> None:
    more = {"directory": tmp_path / "out"} if function is epcache.compile else {}
    with pytest.raises(ValueError, match="provider_options= belongs to providers="):
        function(source, ep=OPENVINO.name, provider_options=[{"a": "1"}], **more)
    with pytest.raises(ValueError, match="provider_options= belongs to providers="):
        epcache.SessionGroup([source] * 2, ep=OPENVINO.name, provider_options=[{"a": "1"}])


def test_arguments_that_would_not_be_used_are_refused(source: str, tmp_path: Path) -> None:
    one = epcache.ExecutionProvider(OPENVINO.name, library="/lib/other.so")
    with pytest.raises(ValueError, match=r"runtime=Runtime\(libraries="):
        epcache.Client("/nowhere").acquire(source, one)
    with pytest.raises(ValueError, match="external= opens the files of one model"):
        epcache.Client("/nowhere").acquire(
            source, OPENVINO.name, group=[source], external=lambda location: 0
        )
    with pytest.raises(ValueError, match="explain compiles nothing"):
        epcache.Client("/nowhere").explain(source, OPENVINO.name, on_miss="refresh")
    with pytest.raises(ValueError, match="needs wait=True"):
        epcache.warm(source, ep=OPENVINO.name, progress=True)
    _plugins.plugin(epcache.ExecutionProvider(OPENVINO.name))  # registers its own library
    with pytest.raises(epcache.Unavailable, match="registered in this process from"):
        epcache.InferenceSession(source, ep=one, client=False)


@pytest.mark.parametrize("model", [None, bytearray(b"x"), 7], ids=["None", "bytearray", "int"])
def test_a_model_of_another_type_is_onnxruntimes_error(model: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError) as plain:
        ort.InferenceSession(model)
    ep = OPENVINO.name
    for use in (
        lambda: epcache.InferenceSession(model, ep=ep),
        lambda: epcache.InferenceSession(model, ep=ep, client=False),
        lambda: epcache.SessionGroup([b"m", model], ep=ep),
        lambda: epcache.why(model, ep=ep),
        lambda: epcache.warm([model], ep=ep),
        lambda: epcache.compile(model, tmp_path, ep=ep),
    ):
        with pytest.raises(TypeError) as raised:
            use()
        assert str(raised.value) == str(plain.value)
    with pytest.raises(TypeError, match="Unable to load from type"):
        epcache.Client("/nowhere").acquire(None, ep)


def test_an_onnxruntime_without_plugins_makes_plain_sessions(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_plugins, "_registered", {})
    monkeypatch.delattr(ort, "get_ep_devices")
    monkeypatch.delattr(ort, "register_execution_provider_library")
    for named in ({"ep": OPENVINO.spec}, {"providers": [OPENVINO.name, CPU]}):
        with pytest.warns(epcache.EpcacheWarning, match="has no plugin execution providers"):
            session = epcache.InferenceSession(source, epcache.SessionOptions(), **named)
        assert session.get_providers() == [CPU]


def test_run_beside_a_built_in_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    one = epcache.ExecutionProvider(OPENVINO.name)
    monkeypatch.setattr(_plugins, "plugin", lambda ep: _plugins.Plugin(ep, [], None))
    assert _requested._in_single_precision(one) == one


def test_run_reports_programs_that_only_import_genai(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime_genai.py").write_text("")
    report = tmp_path / "report"
    report.touch()
    hook = Path(epcache.__file__).parent / "_run" / "hook"
    subprocess.run(
        [sys.executable, "-c", "import onnxruntime_genai"],
        env={
            "PYTHONPATH": f"{hook}:{tmp_path}",
            "EPCACHE_RUN": "{}",
            "EPCACHE_RUN_REPORT": str(report),
        },
        check=True,
    )
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert ["other", "onnxruntime_genai"] in [[one["kind"], one.get("what")] for one in lines]


def test_plain_session_gets_the_options_that_name_a_file() -> None:
    one = epcache.ExecutionProvider("E", options={"a": "1"}, files={"f": "/file"})
    assert _plugins.Plugin(one, [], None).given == {"a": "1", "f": "/file"}


def test_same_plain_options_twice(source: str) -> None:
    """They cannot be copied, so the first session adds the execution provider to them; the second
    one knows that the application did not.
    """
    options = ort.SessionOptions()
    for _ in range(2):
        session = epcache.InferenceSession(source, options, ep=OPENVINO.spec, client=False)
        assert session.get_providers() == [OPENVINO.name, CPU]
    with pytest.raises(ValueError, match="used for other execution providers before"):
        epcache.InferenceSession(source, options, ep=OPENVINO.name, client=False)


def test_enable_fallback_applies_to_run_only(source: str) -> None:
    plain = epcache.InferenceSession(source, ep=OPENVINO.spec, client=False)
    asked = epcache.InferenceSession(source, ep=OPENVINO.spec, client=False, enable_fallback=1)
    assert (plain._enable_fallback, asked._enable_fallback) == (False, True)


def test_packages_are_found_by_name_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in {
        "onnxruntime_ep_new": "",
        "onnxruntime_other": "libonnxruntime_providers_other.so",
        "onnxruntime_tools": "",
        "unrelated": "libonnxruntime_providers_unrelated.so",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            "from pathlib import Path\n"
            "def get_library_path(): return str(Path(__file__).with_name('lib.so'))\n"
            f"def get_ep_name(): return '{name}ExecutionProvider'\n"
        )
        if file:
            (tmp_path / name / file).write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    ours = [name for name in _plugins.packages() if (tmp_path / name).exists()]
    assert sorted(ours) == ["onnxruntime_ep_new", "onnxruntime_other"]
    assert _plugins._packaged_library("onnxruntime_otherExecutionProvider") == str(
        tmp_path / "onnxruntime_other" / "lib.so"
    )
    assert _plugins._packaged_library("unrelatedExecutionProvider") is None


def test_cpu_alone_is_kept() -> None:
    plugins, missing = _providers.available(_providers.specified([CPU], None))
    assert ([p.ep.name for p in plugins], missing) == ([CPU], [])


def test_devices_passed_by_epcachectl_run() -> None:
    told = {
        "name": "E",
        "devices": [{"type": "NPU", "vendor_id": 0x8086, "device_id": 3, "metadata": {"k": "v"}}],
    }
    assert _settings._provider(told).devices == (epcache.Device("NPU", 0x8086, 3, {"k": "v"}),)


def test_a_machine_without_a_device_gets_a_plain_session_and_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def without_device(ep: epcache.ExecutionProvider, devices: Any = None) -> Any:
        raise epcache.Unavailable(f"{ep.name} lists no device here", "", {"devices": "0"})

    monkeypatch.setattr(_plugins, "plugin", without_device)
    model = make_model(tmp_path / "model.onnx")
    with pytest.warns(epcache.EpcacheWarning) as warned:
        session = epcache.InferenceSession(
            model, epcache.SessionOptions(), ep="OpenVINOExecutionProvider:CPU"
        )
    assert [str(one.message) for one in warned] == [
        "bypassed: OpenVINOExecutionProvider lists no device here; "
        "the session runs on CPUExecutionProvider"
    ]
    assert session.epcache.outcome == "bypassed"


@pytest.mark.parametrize(
    ("machine", "libc", "says"),
    [
        ("aarch64", "glibc 2.39", "has no wheel for aarch64"),
        ("x86_64", "", "has no wheel for musl, only for glibc"),
        ("x86_64", "glibc 2.17", "needs glibc 2.28, and this is 2.17"),
        ("x86_64", "glibc 2.39", ""),
    ],
)
def test_packages_that_do_not_exist_for_a_machine_are_not_recommended(
    monkeypatch: pytest.MonkeyPatch, machine: str, libc: str, says: str
) -> None:
    monkeypatch.setattr(_machine.platform, "machine", lambda: machine)
    monkeypatch.setattr(_machine.os, "confstr", lambda name: libc)
    monkeypatch.setattr(_plugins, "_packaged_library", lambda name: None)
    assert _machine.no_package("onnxruntime-ep-openvino").endswith(says)
    with pytest.raises(epcache.Unavailable) as raised:
        _plugins._find_library("OpenVINOExecutionProvider")
    assert (raised.value.facts.get("devices") == "0") == bool(says)
    assert ("pip install" in str(raised.value)) == (not says)
