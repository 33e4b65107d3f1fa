"""Interprets the recorded calls of SessionOptions. Each call or assignment affects the compile,
affects only how the model runs, or is not supported. With an unsupported one the session is a plain
one, with the reason. Calls of a later ONNX Runtime count as unsupported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _devices, _policy, _session_keys
from ._fields import dataclass, field
from ._onnxruntime import ort
from ._request import Device, ExecutionProvider, option_text

LEVELS = {
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL: "disable_all",
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC: "basic",
    ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED: "extended",
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL: "all",
}
# The oldest supported version does not have it.
if hasattr(ort.GraphOptimizationLevel, "ORT_ENABLE_LAYOUT"):
    LEVELS[ort.GraphOptimizationLevel.ORT_ENABLE_LAYOUT] = "layout"
LEVELS_BY_NAME = {name: level for level, name in LEVELS.items()}

# Properties that affect how a session runs and not the compile: they are not sent to the daemon,
# but set on the session that loads the result.
_RUN_PROPERTIES = frozenset(
    "enable_cpu_mem_arena enable_mem_pattern enable_mem_reuse enable_profiling execution_mode "
    "execution_order inter_op_num_threads intra_op_num_threads log_severity_level "
    "log_verbosity_level logid profile_file_prefix use_deterministic_compute "
    "use_per_session_threads".split()
)
_RUN_ENTRIES = _session_keys.RUN | _session_keys.SERVE
# Calls that are repeated on the session that loads the result.
_RUN_CALLS = frozenset(("set_load_cancellation_flag",))


@dataclass
class Record:
    """The recorded calls of a SessionOptions, and their meaning."""

    # as SessionOptions records them
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    entries: dict[str, str] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)
    dims_by_denotation: dict[str, int] = field(default_factory=dict)
    level: str = ""
    # with ONNX Runtime's own devices
    providers: list[tuple[ExecutionProvider, Any]] = field(default_factory=list)
    policy: Any = None  # a device policy; ignored if a provider is added
    reasons: list[str] = field(default_factory=list)  # why the cache cannot be used

    def asked_entries(self) -> dict[str, str]:
        """Returns the session config entries for Client.acquire: without those that only affect how
        a session runs.
        """
        return {key: value for key, value in self.entries.items() if key not in _session_keys.RUN}

    def compile_level(self) -> str:
        """Returns the graph optimisation level to compile with, so that the result computes the
        same as a plain session.

        At "basic" a session folds constants and shapes before execution providers choose their
        nodes; otherwise they may leave many nodes to the CPU. Higher levels affect only the nodes
        that are left to the CPU; those are optimised at the application's level when the compiled
        graph is loaded.
        """
        return "disable_all" if self.level == "disable_all" else "basic"

    def replay(self, only_running: bool) -> ort.SessionOptions:
        """Returns plain options with the same settings; with `only_running` only those that affect
        how the model runs.

        Fixed dimensions are always included, because nodes that are left to the CPU still have free
        dimensions in a compiled graph.
        """
        options = ort.SessionOptions()
        for name, arguments in self.calls:
            if only_running and not _affects_running(name, arguments):
                continue
            if name.startswith("="):
                setattr(options, name[1:], arguments[0])
            else:
                getattr(options, name)(*arguments)
        return options


def _affects_running(name: str, arguments: tuple[Any, ...]) -> bool:
    if name.startswith("="):
        return name[1:] in _RUN_PROPERTIES or name == "=graph_optimization_level"
    if name == "add_session_config_entry":
        return arguments[0] in _RUN_ENTRIES
    return name in _RUN_CALLS or name.startswith("add_free_dimension_override")


def record_of(calls: Sequence[tuple[str, tuple[Any, ...]]]) -> Record:
    """Returns the record of these calls. The name of an assignment is "=name"."""
    record = Record(list(calls))
    for name, arguments in calls:
        if name.startswith("="):
            _record_assignment(record, name[1:], arguments[0])
        elif recorder := _RECORDERS.get(name):
            recorder(record, *arguments)
        elif name not in _RUN_CALLS:
            record.reasons.append(
                f"SessionOptions.{name} was called, which epcache does not support"
            )
    return record


def _record_assignment(record: Record, name: str, value: Any) -> None:
    if name == "graph_optimization_level":
        record.level = LEVELS.get(value, "")
        if not record.level:
            record.reasons.append(f"graph optimization level {value} is unknown to epcache")
    elif name not in _RUN_PROPERTIES:
        record.reasons.append(f"SessionOptions.{name} is set, which epcache does not support")


def _add_session_config_entry(record: Record, key: str, value: str) -> None:
    record.entries[str(key)] = str(value)
    if because := _session_keys.REFUSED.get(str(key)):
        record.reasons.append(f"session config entry {key!r}: {because}")


def _add_dimension(record: Record, name: str, value: int) -> None:
    record.dims[str(name)] = int(value)


def _add_dimension_by_denotation(record: Record, denotation: str, value: int) -> None:
    record.dims_by_denotation[str(denotation)] = int(value)


def resolve_policy(record: Record) -> None:
    """Replaces the policy by the provider and device that it chooses, or adds the reason why that
    is not possible.
    """
    if record.policy is None or record.providers or record.reasons:
        return
    try:
        _add_provider_for_devices(record, [_policy.chosen(record.policy)], {})
    except _policy.Undecided as undecided:
        record.reasons.append(str(undecided))


def _add_provider_for_devices(
    record: Record, devices: Sequence[Any], options: Mapping[str, Any]
) -> None:
    devices = list(devices)
    listed = ort.get_ep_devices()
    selectors = [_devices.selector(device, listed) for device in devices]
    if None in selectors:
        record.reasons.append(
            "the device has the same type, vendor id, device id and metadata as an earlier one"
        )
    settings = {str(key): option_text(value) for key, value in options.items()}
    fixed = tuple(one or Device() for one in selectors)
    record.providers.append((ExecutionProvider(devices[0].ep_name, fixed, settings), devices))


def _set_policy(record: Record, policy: Any) -> None:
    record.policy = policy


_RECORDERS: dict[str, Callable[..., None]] = {
    "add_session_config_entry": _add_session_config_entry,
    "add_free_dimension_override_by_name": _add_dimension,
    "add_free_dimension_override_by_denotation": _add_dimension_by_denotation,
    "add_provider_for_devices": _add_provider_for_devices,
    "set_provider_selection_policy": _set_policy,
}
