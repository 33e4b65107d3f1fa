"""SessionOptions record every call, and an unknown one is never ignored."""

from __future__ import annotations

import pytest

ort = pytest.importorskip(
    "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
)

import epcache  # noqa: E402
import numpy as np  # noqa: E402
from epcache import _record, _session_keys, _session_options  # noqa: E402

Level = ort.GraphOptimizationLevel


@pytest.fixture
def options() -> epcache.SessionOptions:
    return epcache.SessionOptions()


def test_every_method_of_onnxruntime_is_recorded() -> None:
    methods = {
        n
        for n in dir(ort.SessionOptions)
        if not n.startswith("_") and callable(getattr(ort.SessionOptions, n))
    }
    assert methods - set(vars(epcache.SessionOptions)) == set(_session_options._READERS)


def test_unknown_method_is_a_reason(
    options: epcache.SessionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ort.SessionOptions, "from_a_later_version", lambda self, value: None, raising=False
    )
    _session_options._recording("from_a_later_version")(options, 1)
    assert options._record.reasons == [
        "SessionOptions.from_a_later_version was called, which epcache does not support"
    ]


def test_settings_that_affect_the_compile_are_sent(options: epcache.SessionOptions) -> None:
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_free_dimension_override_by_name("batch", 4)
    options.add_free_dimension_override_by_denotation("DATA_CHANNEL", 3)
    record = options._record
    assert record.asked_entries() == {"session.disable_cpu_ep_fallback": "1"}
    assert (record.dims, record.dims_by_denotation) == ({"batch": 4}, {"DATA_CHANNEL": 3})
    assert record.reasons == []
    assert options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1", (
        "ONNX Runtime was told as well"
    )


RUNNING = {
    "intra_op_num_threads": 3,
    "inter_op_num_threads": 2,
    "enable_mem_pattern": False,
    "enable_cpu_mem_arena": False,
    "execution_mode": ort.ExecutionMode.ORT_PARALLEL,
    "log_severity_level": 3,
    "logid": "x",
    "use_deterministic_compute": True,
}


@pytest.mark.parametrize("name", RUNNING)
def test_settings_that_affect_running_are_restored_and_not_sent(
    options: epcache.SessionOptions, name: str
) -> None:
    setattr(options, name, RUNNING[name])
    assert options._record.reasons == []
    assert getattr(options._record.replay(only_running=True), name) == RUNNING[name]
    assert getattr(options._record.replay(only_running=False), name) == RUNNING[name]


@pytest.mark.parametrize("key", sorted(_session_keys.RUN | _session_keys.SERVE))
def test_entries_that_affect_running_are_restored(
    options: epcache.SessionOptions, key: str
) -> None:
    options.add_session_config_entry(key, "1")
    assert options._record.reasons == []
    assert set(options._record.asked_entries()) == ({key} & _session_keys.SERVE), (
        "the daemon decides by that one, too"
    )
    assert options._record.replay(only_running=True).get_session_config_entry(key) == "1"


@pytest.mark.parametrize("key", sorted(_session_keys.REFUSED))
def test_refused_entries_make_a_plain_session(options: epcache.SessionOptions, key: str) -> None:
    options.add_session_config_entry(key, "x")
    assert options._record.reasons == [
        f"session config entry {key!r}: {_session_keys.REFUSED[key]}"
    ]
    assert options._record.replay(only_running=False).get_session_config_entry(key) == "x"


def test_directory_of_external_data_is_not_that_of_the_artefact(
    options: epcache.SessionOptions,
) -> None:
    (key,) = _session_keys.DIRECTORY
    options.add_session_config_entry(key, "/weights")
    assert options._record.asked_entries() == {key: "/weights"}, (
        "Client.acquire opens the files there"
    )
    with pytest.raises(Exception, match=key):
        options._record.replay(only_running=True).get_session_config_entry(key)


def test_compile_entries_are_left_to_the_answer(options: epcache.SessionOptions) -> None:
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    with pytest.raises(Exception, match="disable_quant_qdq"):
        options._record.replay(only_running=True).get_session_config_entry(
            "session.disable_quant_qdq"
        )
    plain = options._record.replay(only_running=False)
    assert plain.get_session_config_entry("session.disable_quant_qdq") == "1"


@pytest.mark.parametrize(
    ("level", "want"),
    [
        pytest.param(None, "basic", id="not set"),
        pytest.param(Level.ORT_DISABLE_ALL, "disable_all", id="disable all"),
        pytest.param(Level.ORT_ENABLE_BASIC, "basic", id="basic"),
        pytest.param(Level.ORT_ENABLE_EXTENDED, "basic", id="extended"),
        pytest.param(Level.ORT_ENABLE_ALL, "basic", id="all"),
    ],
)
def test_level_to_compile_with(options: epcache.SessionOptions, level: object, want: str) -> None:
    if level is not None:
        options.graph_optimization_level = level
        assert options._record.replay(only_running=True).graph_optimization_level == level
    assert options._record.compile_level() == want
    assert options._record.reasons == []


@pytest.mark.parametrize("name", ["graph_optimization_level", "intra_op_num_threads"])
def test_value_that_onnxruntime_refuses_is_not_recorded(
    options: epcache.SessionOptions, name: str
) -> None:
    with pytest.raises(TypeError):
        setattr(options, name, "x")
    with pytest.raises(TypeError):
        options.add_free_dimension_override_by_name("batch", "x")
    assert options._record == _record.Record()


def test_misspelled_attribute_is_an_error(options: epcache.SessionOptions) -> None:
    with pytest.raises(AttributeError):
        options.intra_op_threads = 3


def write_optimized_model(options: epcache.SessionOptions) -> None:
    options.optimized_model_filepath = "/x"


def initializer(options: epcache.SessionOptions) -> None:
    options.add_initializer("w", ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32)))


@pytest.mark.parametrize(
    "tell",
    [
        pytest.param(write_optimized_model, id="optimized model"),
        pytest.param(initializer, id="initializer"),
        pytest.param(
            lambda o: o.set_provider_selection_policy_delegate(lambda *_: []), id="device delegate"
        ),
        pytest.param(
            lambda o: o.add_session_config_entry("ep.context_enable", "1"), id="own compile"
        ),
        pytest.param(
            lambda o: o.add_session_config_entry("ep.context_file_path", "/x"),
            id="own context file",
        ),
    ],
)
def test_unsupported_settings_are_reasons(options: epcache.SessionOptions, tell: object) -> None:
    tell(options)
    assert len(options._record.reasons) == 1


def test_plain_onnxruntime_accepts_these_options(
    options: epcache.SessionOptions, tmp_path: object
) -> None:
    from providers import INPUTS, make_model

    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        make_model(tmp_path / "m.onnx"), options, providers=["CPUExecutionProvider"]
    )
    assert session.run(None, INPUTS)[0].shape == (1, 64)
