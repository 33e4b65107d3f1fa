package compilers

import (
	"bytes"
	"debug/elf"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// epCode names the libraries in which an EP reads its options, where the table's library only
// loads them.
var epCode = map[string][]string{
	"OpenVINOExecutionProvider": {
		"libvendor_openvino_plugin.so", "libonnxruntime_providers_openvino.so",
	},
}

// noOptions are words of the libraries that look like options, and what they are instead.
var noOptions = map[string]map[string]string{
	"OpenVINOExecutionProvider": {
		"attributes of EPContext nodes, and what they hold": `
			blob_metadata_map data_offset ep_cache_context ep_context ep_sdk_version
			hardware_architecture main_context max_size onnx_model_filename ov_compat_string
			ovep_bin_ver ovep_compat_ver ovep_ver partition_name weights_file weights_metadata_map`,
		"metadata of devices, of the provider and of models": `
			doc_string external_only get_metadata is_virtual model_version npu_platform
			os_driver_version ov_device ov_meta_device producer_name uninterpreted_option
			weightless_support`,
		"an option of the library's registration": `
			allow_virtual_devices`,
		"options for SetEpDynamicOptions": `
			kvcache_reorder kvcache_rewind`,
		"names of inputs, tensors, nodes and graph transformations": `
			beam_idx copy_model dequantize_patte_weights_as_inpu dst_idx dst_index
			input_hidden_states input_ids inputs_embeds matched_names past_key_values position_ids
			remote_context scale_convert shared_context src_idx src_index`,
		"fields of profiles": `
			ort_correlation_id ov_exec_type ov_node_type ov_status parent_ort_event_name`,
		"exceptions and functions of the C++ libraries": `
			invalid_iterator narrowing_error out_of_range parse_error read_symlink symlink_status
			temp_directory_path type_error`,
	},
	"NvTensorRTRTXExecutionProvider": {
		"attributes of EPContext nodes, and what they hold": `
			ep_cache_context ep_context_op_domain hardware_architecture onnx_model_filename
			target_architecture`,
		"entries of the environment, options of a run, metadata of devices": `
			allow_virtual_devices cuda_graph_annotation_id nv_ep_ort_api_version
			nv_hardware_device_id nv_profile_index pci_bus_id`,
		"an entry of the session's configuration": `
			multi_rotary_cache_concat_offset`,
		"names of nodes and graph transformations": `
			cast_diff cast_input cast_output cast_qmax cast_qmin cast_scale cast_zero clamped_min
			diff_cast div_node folded_cast folded_constant folded_identity input_cast output_dtype
			qmax_cast qmin_cast reshape_shape scale_cast zero_cast zero_promoted`,
		"types, exceptions and functions of the C++ libraries": `
			basic_string char16_t char32_t char8_t child_length co_await cuda_err
			options_descriptor pool_create_err read_symlink symlink_status temp_directory_path
			uninterpreted_option wchar_t`,
	},
	"QNNExecutionProvider": {
		"attributes of EPContext nodes, and what they hold": `
			ep_cache_context ep_context_type ep_dlc_context ep_sdk_version io_name_overrides
			is_multi_soc_ep_context main_context max_size partition_name`,
		"values of options": `
			critical_plus extreme_power_saver high_plus high_power_saver low_balanced
			low_power_saver normal_high normal_low sustained_high_performance`,
		"options for SetEpDynamicOptions": `
			kvcache_rewind`,
		"fields of the graphs and traces that QNN writes": `
			block_size compilation_target converter_command copyright_str data_type dst_name
			dst_qnn_op_type fusion_count graph_name input_names macs_per_inference model_name
			node_group_type null_tensor num_elements num_initializers num_inputs op_mappings
			op_types output_names params_count qnn_subgraphs quant_params scalar_params soc_traces
			src_axis_format subgraph_traces tensor_mappings tensor_params total_graph_size_bytes
			total_graph_size_mb total_initializer_size_bytes total_input_size_bytes total_onnx_nodes
			total_qnn_ops total_socs unsupported_nodes used_by_operators`,
		"attributes and parameters of operators": `
			align_corners auto_pad cell_gate_qscale center_point_box coordinate_transformation_mode
			count_pad_for_edges cubic_coeff cubic_coeff_a do_rotary exclude_outside filter_size
			forget_gate_qscale hidden_state_offset hidden_state_qscale input_gate_qscale
			interpolation_mode is_causal k_quant_type keep_dims kernel_shape kv_cache_bit_width
			kv_num_heads linear_before_re local_window_size nearest_mode new_axes_mask
			noop_with_empty_axes num_groups num_heads off_value on_value output_gate_qscale
			output_padding output_shape pad_amount pad_constant_value padding_mode pooled_shape
			pytorch_half_pixel q_num_heads qk_matmul_output_mode qk_output reuse_sparse_indices
			reuse_sparse_indicies rotary_interleaved round_prefer_ceil round_prefer_floor
			rounding_mode slice_param smooth_softmax softmax_precision spatial_scale time_major
			transpose_in0 transpose_in1 v_quant_type`,
		"types, and exceptions of the C++ libraries": `
			narrowing_error out_of_range type_error uint16_t uint2_t uint32_t uint4_t uint64_t
			uint8_t`,
	},
}

// optionLike is how options are spelled. Those of one word cannot be distinguished from other
// words.
var optionLike = regexp.MustCompile(`^[a-z][a-z0-9]*(_[a-z0-9]+)+$`)

// optionsLike returns the words in a library's constants that may be options.
func optionsLike(t *testing.T, library string) []string {
	f, err := elf.Open(library)
	require.NoError(t, err)
	defer f.Close() // opened for reading
	data, err := f.Section(".rodata").Data()
	require.NoError(t, err)
	found := map[string]bool{}
	for word := range bytes.SplitSeq(data, []byte{0}) {
		if len(word) < 64 && optionLike.Match(word) {
			found[string(word)] = true
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// An option that is not known is refused, so each that a package brings has to be in the table.
func TestOptionsInTheInstalledLibrariesAreInTheTable(t *testing.T) {
	dir := os.Getenv("EPCACHED_RUNTIMES")
	if dir == "" {
		t.Skip("NOT TESTED: EPCACHED_RUNTIMES is not set; `make test` sets it")
	}
	looked := map[string]int{}
	for _, ep := range EPNames() {
		info := epInfo(t, ep)
		said := map[string]bool{}
		for reason, words := range noOptions[ep] {
			for word := range strings.FieldsSeq(words) {
				require.False(t, said[word], "%s: %s", reason, word)
				require.NotContains(t, info.Options, word, reason)
				said[word] = true
			}
		}
		names := epCode[ep]
		if names == nil {
			names = info.Libraries
		}
		for _, name := range names {
			libraries, err := filepath.Glob(filepath.Join(dir, "*", "onnxruntime*", name))
			require.NoError(t, err)
			inside, err := filepath.Glob(filepath.Join(dir, "*", "onnxruntime", "capi", name))
			require.NoError(t, err)
			for _, library := range append(libraries, inside...) {
				known, unknown := 0, []string{}
				for _, word := range optionsLike(t, library) {
					if _, ok := info.Options[word]; ok {
						known++
					} else if !said[word] {
						unknown = append(unknown, word)
					}
				}
				require.Greater(t, known, 5, "%s: hardly an option is seen in it", library)
				require.Empty(t, unknown,
					"%s: put them into eps.toml, or say in noOptions what they are", library)
				looked[ep]++
			}
		}
	}
	for _, ep := range []string{"OpenVINOExecutionProvider", "QNNExecutionProvider"} {
		require.Positive(t, looked[ep], "%s: none of its libraries in %s", ep, dir)
	}
}
