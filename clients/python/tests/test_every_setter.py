"""The effect of every attribute and method of this ONNX Runtime's SessionOptions: each is part of
the request, restored on the session, or a reason for a plain session.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ort = pytest.importorskip(
    "onnxruntime", reason="needs a runtime: EPCACHED_RUNTIMES, see testdata/fetch-runtimes"
)

import epcache  # noqa: E402
import numpy as np  # noqa: E402
from epcache import _record, _session_options  # noqa: E402
from epcache._session_request import Source, SessionRequest, session_request  # noqa: E402
from openvino_model import source  # noqa: E402, F401
from providers import OPENVINO  # noqa: E402

MEMBERS = [name for name in dir(ort.SessionOptions) if not name.startswith("_")]
METHODS = [name for name in MEMBERS if callable(getattr(ort.SessionOptions, name))]
PROPERTIES = [name for name in MEMBERS if name not in METHODS]

# The effects of each. A method or property of a later ONNX Runtime that is not in the table must
# make a plain session.
REQUEST, RUNNING, BYPASSED = (
    "part of the request",
    "set on the session that loads",
    "the daemon is not asked",
)
FATES = {
    **dict.fromkeys(
        "enable_cpu_mem_arena enable_mem_pattern enable_mem_reuse enable_profiling execution_mode "
        "execution_order inter_op_num_threads intra_op_num_threads log_severity_level "
        "log_verbosity_level logid profile_file_prefix use_deterministic_compute "
        "use_per_session_threads".split(),
        RUNNING,
    ),
    "graph_optimization_level": REQUEST,
    "add_session_config_entry": REQUEST,
    "add_free_dimension_override_by_name": REQUEST,
    "add_free_dimension_override_by_denotation": REQUEST,
    "add_provider_for_devices": REQUEST,
    "set_load_cancellation_flag": RUNNING,
}


def weights() -> Any:
    return ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32))


def devices() -> Any:
    return [device for device in ort.get_ep_devices() if device.ep_name == OPENVINO.name][:1]


ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "add_external_initializers": lambda: (["w"], [weights()]),
    "add_external_initializers_from_files_in_memory": lambda: (["w"], [b"1234"], [4]),
    "add_free_dimension_override_by_denotation": lambda: ("DATA_BATCH", 2),
    "add_free_dimension_override_by_name": lambda: ("batch", 2),
    "add_initializer": lambda: ("w", weights()),
    "add_provider": lambda: ("CPUExecutionProvider", {}),
    "add_provider_for_devices": lambda: (devices(), {"load_config": "{}"}),
    "add_session_config_entry": lambda: ("session.disable_quant_qdq", "1"),
    "clear_ep_context_data_read_func": lambda: (),
    "register_custom_ops_library": lambda: ("/nowhere.so",),
    "set_ep_context_data_read_func": lambda: (lambda *_: None, 1 << 20),
    "set_load_cancellation_flag": lambda: (True,),
    "set_provider_selection_policy": lambda: (ort.OrtExecutionProviderDevicePolicy.PREFER_CPU,),
    "set_provider_selection_policy_delegate": lambda: (lambda *_: [],),
}


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    yield
    gc.collect()


def another(value: Any) -> Any:
    """Returns another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return next(member for member in type(value).__members__.values() if member != value)


def question_of(one: SessionRequest) -> tuple[Any, ...]:
    question: Any = one.question(epcache.Client("/nowhere"), {})
    return question.args, question.keywords


def want(options: epcache.SessionOptions, source: str) -> SessionRequest:
    return session_request(source, options, None if options.has_providers() else OPENVINO.spec)


@pytest.mark.parametrize("name", PROPERTIES)
def test_effect_of_every_attribute(source: str, name: str) -> None:
    options = epcache.SessionOptions()
    value = another(getattr(options, name))
    setattr(options, name, value)
    assert getattr(options, name) == value, "ONNX Runtime was told as well"
    one = want(options, source)
    fate = FATES.get(name, BYPASSED)
    assert (f"SessionOptions.{name} is set" in one.why_not()) == (fate == BYPASSED)
    assert (one.why_not() == "") == (fate != BYPASSED)
    assert (question_of(one) != question_of(want(epcache.SessionOptions(), source))) == (
        fate == REQUEST
    )
    if fate != BYPASSED:
        assert getattr(options._record.replay(only_running=True), name) == value
    assert getattr(options._record.replay(only_running=False), name) == value, (
        "a plain session is told all of it"
    )


@pytest.mark.parametrize("name", sorted(set(METHODS) - _session_options._READERS))
def test_effect_of_every_method(source: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name in ARGUMENTS, (
        "a method that this test does not know: say here what it takes, and above what becomes "
        "of it"
    )
    options = epcache.SessionOptions()
    # replaced, because there is no library to register, and refused calls are not recorded
    if name == "register_custom_ops_library":
        monkeypatch.setattr(ort.SessionOptions, name, lambda self, path: None)
        _session_options._recording(name)(options, *ARGUMENTS[name]())
    else:
        getattr(options, name)(*ARGUMENTS[name]())
    assert [call for call, _ in options._record.calls] == [name]
    one = want(options, source)
    # the policy is resolved to one device, or is a reason
    if name == "set_provider_selection_policy":
        assert bool(one.plugins) != bool(one.why_not())
        return
    fate = FATES.get(name, BYPASSED)
    assert (f"SessionOptions.{name} was called" in one.why_not()) == (fate == BYPASSED)
    assert (one.why_not() == "") == (fate != BYPASSED)
    if fate != BYPASSED:
        assert (question_of(one) != question_of(want(epcache.SessionOptions(), source))) == (
            fate == REQUEST
        )
    again = {
        "set_load_cancellation_flag",
        "add_free_dimension_override_by_name",
        "add_free_dimension_override_by_denotation",
    }
    restored = _record._affects_running(name, ARGUMENTS[name]())
    assert restored == (name in again)


def test_request_has_the_recorded_arguments(source: str) -> None:
    options = epcache.SessionOptions()
    want(epcache.SessionOptions(), source)  # registers the library
    for name in (
        "add_session_config_entry",
        "add_free_dimension_override_by_name",
        "add_free_dimension_override_by_denotation",
    ):
        getattr(options, name)(*ARGUMENTS[name]())
    options.add_provider_for_devices(*ARGUMENTS["add_provider_for_devices"]())
    (path, (ep,)), request = question_of(want(options, source))
    assert (path, ep.name, ep.options) == (source, OPENVINO.name, {"load_config": "{}"})
    assert request["session_options"] == {"session.disable_quant_qdq": "1"}
    assert (request["dims"], request["dims_by_denotation"]) == ({"batch": 2}, {"DATA_BATCH": 2})


def test_cancelled_load_is_cancelled_in_the_session_that_loads(source: str) -> None:
    options = epcache.SessionOptions()
    options.set_load_cancellation_flag(True)
    with pytest.raises(Exception, match="(?i)cancel"):
        ort.InferenceSession(
            source,
            options._record.replay(only_running=True),
            providers=["CPUExecutionProvider"],
            enable_fallback=0,
        )
