//go:build linux && (amd64 || arm64)

package cache

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
)

// secondStore is another store over the same runtime: its state directory lies deeper, and so does
// everything that a job has.
func secondStore(t *testing.T, r compilers.Runtime) *bench {
	b, _ := newRealBench(t, r)
	b.close()
	b.state = filepath.Join(filepath.Dir(b.state), "a deeper", "place", "state")
	require.NoError(t, os.MkdirAll(filepath.Dir(b.state), 0o700))
	b.open()
	return b
}

// writeModel writes a model into a directory of its own, and opens it.
func (b *bench) writeModel(name string, model []byte) *os.File {
	path := filepath.Join(b.TempDir(), name)
	require.NoError(b, os.WriteFile(path, model, 0o644))
	return b.openFile(path)
}

// Two daemons compile one request to the same bytes, whatever their directories and the models'
// files are called, and whether a worker reads the original or a private copy.
func TestBuildsAreReproducible(t *testing.T) {
	ovep := identity.EP{Name: "OpenVINOExecutionProvider"}
	eps := map[string]struct {
		ep      identity.EP
		runtime func(*testing.T) compilers.Runtime
	}{
		"OpenVINO 1.8.1": {ovep, runtimeNamed("openvino-1.8.1")},
		"OpenVINO 1.6.1": {ovep, runtimeNamed("openvino-1.6.1")},
		"OpenVINO 1.4.0": {ovep, runtimeNamed("openvino-1.4.0")},
		"QNN 2.7.0": {identity.EP{Name: qnn,
			Options: map[string]string{"soc_model": "60", "enable_htp_fp16_precision": "1"}},
			runtimeNamed("qnn-2.7.0")},
		"test EP": {identity.EP{Name: compilertest.TestEP,
			Devices: []compilers.Device{{Metadata: map[string]string{"device_id": "0"}}}},
			func(t *testing.T) compilers.Runtime {
				return compilertest.TestEPRuntime(t, "1.31.1", compilertest.Release{})
			}},
	}
	asks := map[string]struct {
		seed   uint64 // so that no build answers another request
		rows   []int
		change func(*request.Request)
	}{
		"compile API": {1, []int{1}, func(*request.Request) {}},
		"session options": {2, []int{1},
			func(r *request.Request) { r.Route = compilers.RouteSessionOptions }},
		"embedded": {3, []int{1}, func(r *request.Request) { r.Embed = true }},
		"group":    {4, []int{1, 2, 4}, func(*request.Request) {}},
	}
	for name, c := range eps {
		t.Run(name, func(t *testing.T) {
			r := c.runtime(t)
			here, _ := newRealBench(t, r)
			there := secondStore(t, r)
			for name, ask := range asks {
				t.Run(name, func(t *testing.T) {
					build := func(b *bench, modelName string, copied bool) map[string]string {
						if !copied {
							b.later.Store(int64(time.Hour)) // the times of its files are believed
						}
						var r *request.Request
						for i, rows := range ask.rows {
							f := b.writeModel(modelName, compilertest.Dense(ask.seed, 64, rows))
							if i == 0 {
								r = b.request(f)
								r.EPs = []identity.EP{c.ep}
								continue
							}
							r.Group = append(r.Group, identity.Files{Name: f.Name(), Graph: f})
						}
						ask.change(r)
						a := b.acquire(r)
						require.Equal(t, request.Compiled, a.Outcome)
						return b.read(a)
					}
					first := build(here, "m.onnx", false)
					require.GreaterOrEqual(t, len(first), len(ask.rows))
					require.Equal(t, first,
						build(there, strings.Repeat("another", 5)+".onnx", true))
				})
			}
		})
	}
}

func runtimeNamed(name string) func(*testing.T) compilers.Runtime {
	return func(t *testing.T) compilers.Runtime { return compilertest.Runtime(t, name) }
}
