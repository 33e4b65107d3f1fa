package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/unixsock/wire"
)

// Where a compiled graph says what it needs.
const (
	openVINOInfo = "ep_compatibility_info.OpenVINOExecutionProvider"
	qnnInfo      = "ep_compatibility_info.QNNExecutionProvider"
)

func withRuntime(dir string) func(*wire.Acquire) {
	return func(r *wire.Acquire) { r.Runtime = &wire.Runtime{Directory: dir} }
}

func embedded(r *wire.Acquire) { r.Embed = true }

// graphOf returns the bytes of the answer's graph.
func (a lease) graphOf(t testing.TB) []byte { return contentOf(t, filepath.Join(a.View, a.Graph)) }

// Compiled models that applications bring say of themselves what their metadata holds. Anybody can
// write that, and no execution provider compares it with the bytes: whether it loads decides, and
// the degrees of fit are distinguished.
func TestStatedCompatibilityOfCompiledModels(t *testing.T) {
	t.Parallel()
	now, old := runtimeDir(t, openVINO), runtimeDir(t, olderOpenVINO)
	c := newSite(t, now, old).start(t).dial()
	source := writeModel(t, t.TempDir(), 1)
	current := get(t, c, source, embedded, withRuntime(now)).graphOf(t)
	outdated := get(t, c, source, embedded, withRuntime(old)).graphOf(t)
	said := metadataOf(t, current, openVINOInfo)
	require.Contains(t, said, "ov=")
	require.Empty(t, metadataOf(t, outdated, openVINOInfo), "else this test shows less")
	const foreign = "v2:6:2.51.0:5.51.0:0:60:0:0"

	cases := map[string]struct {
		model         []byte
		compatibility string
	}{
		"as it was made":                    {current, "optimal"},
		"another provider's string as well": {withMetadata(current, qnnInfo, foreign), "optimal"},
		"not a string": {withoutMetadata(t, current, openVINOInfo),
			"prefer_recompilation"},
		"another provider's string alone": {withMetadata(withoutMetadata(t, current, openVINOInfo),
			qnnInfo, foreign), "prefer_recompilation"},
		"another provider's string as its own": {
			withMetadata(withoutMetadata(t, current, openVINOInfo), openVINOInfo, foreign),
			"unsupported"},
		"string of another SDK": {
			withMetadata(withoutMetadata(t, current, openVINOInfo), openVINOInfo,
				strings.Replace(said, "ov=2026", "ov=2025", 1)), "unsupported"},
		"made by another SDK": {outdated, "unsupported"},
		"made by another SDK, with a string that fits": {withMetadata(outdated, openVINOInfo,
			said), "unsupported"},
		"made by another SDK, with another provider's string": {withMetadata(outdated, qnnInfo,
			foreign), "unsupported"},
	}
	for name, test := range cases {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "compiled_ctx.onnx")
			require.NoError(t, os.WriteFile(path, test.model, 0o644))
			answer := get(t, c, path, withRuntime(now))
			require.Equal(t, "passthrough", answer.Outcome)
			require.Equal(t, test.compatibility, answer.Compatibility, answer.CompatibilityReason)
			require.Equal(t, "load check", answer.CompatibilitySource)
			require.NotEmpty(t, answer.CompatibilityReason)
		})
	}
}

// A source model's metadata survives its compilation. A string there says nothing of the build,
// whomever it is about.
func TestStringsOfSourceModels(t *testing.T) {
	t.Parallel()
	now, old := runtimeDir(t, openVINO), runtimeDir(t, olderOpenVINO)
	d := newSite(t, now, old).start(t)
	c := d.dial()
	said := metadataOf(t, get(t, c, writeModel(t, t.TempDir(), 1), withRuntime(now)).graphOf(t),
		openVINOInfo)
	require.NotEmpty(t, said)
	for seed, key := range []string{openVINOInfo, qnnInfo} {
		t.Run(key, func(t *testing.T) {
			m := compilertest.DenseModel(uint64(seed+2), 16, 1)
			m.Metadata = map[string]string{key: said}
			path := filepath.Join(t.TempDir(), "labelled.onnx")
			require.NoError(t, os.WriteFile(path, m.Encode(), 0o644))

			outdated := get(t, c, path, withRuntime(old))
			require.Equal(t, "compiled", outdated.Outcome)
			require.Equal(t, said, metadataOf(t, outdated.graphOf(t), key),
				"it survives, else this test shows nothing")
			for _, b := range d.list() {
				if b.Build == outdated.Build {
					require.Empty(t, b.CompatibilityString)
				}
			}
			answer := get(t, c, path, withRuntime(now))
			require.Equal(t, "compiled", answer.Outcome,
				"the other library reads nothing of it: %s", answer.Why)
			require.NotEqual(t, outdated.Build, answer.Build)
			require.Equal(t, outdated.Build, get(t, c, path, withRuntime(old), onMissFail).Build)
		})
	}
}
