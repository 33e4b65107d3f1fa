//go:build linux && (amd64 || arm64)

package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
)

// An application that uses its vendor's cache gets the same builds as one that does not, and its
// cache directory stays empty.
func TestVendorCachesAreSuperseded(t *testing.T) {
	b, _ := newRealBench(t, compilertest.Runtime(t, "openvino-1.8.1"))
	const ep = "OpenVINOExecutionProvider"
	path := filepath.Join(t.TempDir(), "m.onnx")
	require.NoError(t, os.WriteFile(path, compilertest.Dense(1, 8, 2), 0o644))
	vendors := t.TempDir()
	ask := func(options map[string]string) *request.Request {
		r := b.request(b.openFile(path))
		r.EPs = []identity.EP{{Name: ep, Options: options}}
		return r
	}
	warning := func(option string) string {
		return `option "` + option + `" of ` + ep +
			" is not used: epcached keeps the compiled model"
	}
	config := `{"CPU": {"INFERENCE_PRECISION_HINT": "f32", "CACHE_DIR": "` + vendors + `"}}`
	first := b.acquire(ask(map[string]string{"cache_dir": vendors, "load_config": config}))
	require.NotEqual(t, request.Hit, first.Outcome)
	require.Equal(t, []string{warning("cache_dir"), warning("load_config.CACHE_DIR")},
		first.Warnings)
	require.Equal(t, map[string]string{"load_config": `{"CPU":{"INFERENCE_PRECISION_HINT":"f32"}}`},
		first.ProviderOptions[ep])
	require.NotContains(t, first.Record, vendors)
	plain := map[string]string{"load_config": `{"CPU":{"INFERENCE_PRECISION_HINT":"f32"}}`}
	second := b.acquire(ask(plain))
	require.Equal(t, request.Hit, second.Outcome)
	require.Equal(t, first.RequestKey, second.RequestKey)
	require.Empty(t, second.Warnings)

	// the object that held only the directory is left out with it
	r := ask(map[string]string{"load_config": `{"CPU": {"cache_dir": "` + vendors + `"}}`})
	require.NotEqual(t, request.Hit, b.acquire(r).Outcome)
	require.Equal(t, request.Hit, b.acquire(ask(nil)).Outcome)
	e := b.explain(r)
	require.Equal(t, "hit", e.Decision)
	require.Contains(t, e.Reason, warning("load_config.cache_dir"))
	entries, err := os.ReadDir(vendors)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func TestSupersededOptionsByProvider(t *testing.T) {
	for ep, options := range map[string][]string{
		"OpenVINOExecutionProvider": {"cache_dir"},
		"TensorrtExecutionProvider": {"trt_engine_cache_enable", "trt_engine_cache_path",
			"trt_engine_cache_prefix", "trt_timing_cache_enable", "trt_timing_cache_path",
			"trt_force_timing_cache"},
		"VitisAIExecutionProvider":       {"cache_dir", "cache_key", "enable_cache_file_io_in_mem"},
		"MIGraphXExecutionProvider":      {"migraphx_model_cache_dir", "migraphx_save_model_path"},
		"CoreMLExecutionProvider":        {"ModelCacheDirectory"},
		"NvTensorRTRTXExecutionProvider": {"nv_runtime_cache_path"},
	} {
		given := identity.EP{Name: ep, Options: map[string]string{}}
		for _, option := range options {
			given.Options[option] = "/caches"
		}
		terms := func(eps []identity.EP) identity.Record {
			record, err := (&identity.Terms{CompileTerms: identity.CompileTerms{EPs: eps}}).Record(
				context.Background(), nil, func(identity.EP) ([]compilers.Device, error) {
					return []compilers.Device{{}}, nil
				})
			require.NoError(t, err, ep)
			return record
		}
		rest, removed := identity.Supersede([]identity.EP{given})
		require.Len(t, removed.Warnings, len(options), ep)
		require.Equal(t, terms([]identity.EP{{Name: ep}}), terms(rest), ep)
		require.Len(t, given.Options, len(options), "the caller's options are unchanged")
		if ep == "NvTensorRTRTXExecutionProvider" {
			require.Equal(t, map[string]map[string]string{ep: given.Options}, removed.Loads,
				"it also keeps what the engine compiles when it loads")
		} else {
			require.Empty(t, removed.Loads, ep)
		}
	}
}
