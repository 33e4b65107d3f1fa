"""The classes of session config entries.

Written by `make session-keys` from cache/identity/session.toml.
"""

from __future__ import annotations

RUN = frozenset(
    (
        "ep.dynamic.qnn_htp_performance_mode",
        "ep.dynamic.workload_type",
        "session.disable_model_compile",
        "session.disable_prepacking",
        "session.dynamic_block_base",
        "session.enable_cpu_mem_arena",
        "session.enable_mem_pattern",
        "session.enable_moe_expert_counting",
        "session.enable_moe_expert_statistics",
        "session.enable_profiling",
        "session.enable_saved_runtime_optimizations",
        "session.execution_mode",
        "session.force_spinning_stop",
        "session.inter_op.allow_spinning",
        "session.inter_op.spin_backoff_max",
        "session.inter_op.spin_duration_us",
        "session.inter_op_num_threads",
        "session.intra_op.allow_spinning",
        "session.intra_op.spin_backoff_max",
        "session.intra_op.spin_duration_us",
        "session.intra_op_num_threads",
        "session.intra_op_thread_affinities",
        "session.log_id",
        "session.log_severity_level",
        "session.log_verbosity_level",
        "session.moe_expert_counter_alpha",
        "session.moe_expert_counter_beta",
        "session.optimized_model_external_initializers_min_size_in_bytes",
        "session.prepack.enable_parallel",
        "session.record_ep_graph_assignment_info",
        "session.use_deterministic_compute",
        "session.use_device_allocator_for_initializers",
        "session.use_env_allocators",
        "session.use_external_initializer_file_buffers_directly",
        "session.use_memory_mapped_ort_model",
        "session.use_ort_model_bytes_directly",
        "session.use_ort_model_bytes_for_initializers",
        "session.use_per_session_threads",
    )
)
SERVE = frozenset(
    (
        "session.fail_on_suboptimal_compiled_model",
    )
)
DIRECTORY = frozenset(
    (
        "session.model_external_initializers_file_folder_path",
    )
)
REFUSED = {
    "ep.context_embed_mode": "epcached sets it: request an embedded context instead",
    "ep.context_enable": "epcached sets it",
    "ep.context_file_path": "epcached sets it",
    "ep.context_model_external_initializers_file_name": "epcached sets it: request it as output",
    "ep.context_source_model_path": "it names a file: a weightless build contains its weights",
    "ep.share_ep_contexts": "epcached sets it for groups",
    "ep.stop_share_ep_contexts": "epcached sets it for groups",
    "optimization.memory_optimizer_config": "it makes ONNX Runtime read a file by name",
    "session.collect_node_memory_stats_to_file": "it makes ONNX Runtime write a file",
    "session.compile_only": "ONNX Runtime sets it for the compile API",
    "session.debug_layout_transformation": "it makes ONNX Runtime write files",
    "session.graph_optimization_level": "use the graph optimization level of the request",
    "session.moe.offload.derived_cache_dir": "it makes ONNX Runtime write files",
    "session.moe.offload.popularity_file": "it makes ONNX Runtime read a file by name",
    "session.moe.offload.source_root": "it makes ONNX Runtime read files by name",
    "session.moe_expert_counter_state_file": "it makes ONNX Runtime read a file by name",
    "session.node_partition_config_file": "it makes ONNX Runtime read a file by name",
    "session.optimized_model_external_initializers_file_name": "it makes ONNX Runtime write a file",
    "session.optimized_model_filepath": "it makes ONNX Runtime write a model",
    "session.resource_cuda_partitioning_settings": "it may make ONNX Runtime read a file by name",
    "session.save_external_prepacked_constant_initializers": "it makes ONNX Runtime write a file",
    "session.save_model_format": "it makes ONNX Runtime write a model",
}
