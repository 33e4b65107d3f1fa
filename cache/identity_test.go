package cache

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

func TestIdentity(t *testing.T) {
	b := newBench(t)
	base := func() *request.Request { return b.request(b.model(1)) }
	key := func(change func(*request.Request)) index.RequestKey {
		r := base()
		r.OnMiss = request.KeyOnly
		change(r)
		return b.acquire(r).RequestKey
	}
	plain := key(func(*request.Request) {})
	same := map[string]func(*request.Request){
		"another name":          func(r *request.Request) { r.Name = "other.onnx" },
		"device spelled out":    func(r *request.Request) { r.EPs[0].Devices = devices("cpu") },
		"default level spelled": func(r *request.Request) { r.GraphOptimizationLevel = "basic" },
		"default route spelled": func(r *request.Request) { r.Route = "compile_api" },
		"session default spelled": func(r *request.Request) {
			r.SessionOptions = map[string]string{"session.disable_quant_qdq": "False"}
		},
		"another user": func(r *request.Request) { r.Peer.UID = 4711 },
		"a time in the past": func(r *request.Request) {
			require.NoError(t, os.Chtimes(r.Graph.Name(), time.Unix(1, 0), time.Unix(1, 0)))
		},
		"the runtime spelled out": func(r *request.Request) { r.Runtime.Directory = b.runtime },
		"the library by its path": func(r *request.Request) {
			r.Runtime.EPLibraries = b.libraries(nil)
		},
		"the library as a file": func(r *request.Request) {
			r.Runtime.EPLibraries = b.libraries(b.openFile(b.libraries(nil)[0].Path))
		},
		"another scope than usual": func(r *request.Request) { r.Store = "user" },
		"fallback spelled out": func(r *request.Request) {
			r.SessionOptions = map[string]string{"session.disable_cpu_ep_fallback": "0"}
		},
	}
	for name, change := range same {
		require.Equal(t, plain, key(change), name)
	}
	other := map[string]func(*request.Request){
		"one weight": func(r *request.Request) { r.Graph = b.model(2) },
		"embedded":   func(r *request.Request) { r.Embed = true },
		"level":      func(r *request.Request) { r.GraphOptimizationLevel = "disable_all" },
		// not the compile API's default
		"a session's level": func(r *request.Request) { r.GraphOptimizationLevel = "all" },
		"session option": func(r *request.Request) {
			r.SessionOptions = map[string]string{"session.disable_quant_qdq": "1"}
		},
		"free dimension": func(r *request.Request) {
			r.FreeDimensions = map[string]int64{"batch": 1}
		},
		"by denotation": func(r *request.Request) {
			r.FreeDimensionsByDenotation = map[string]int64{"batch": 1}
		},
		"other route": func(r *request.Request) { r.Route = "session_options" },
		"provider option": func(r *request.Request) {
			r.EPs[0].Options = map[string]string{"fault": "slow"}
		},
		"dimension is two": func(r *request.Request) {
			r.FreeDimensions = map[string]int64{"batch": 2}
		},
		"another dimension": func(r *request.Request) {
			r.FreeDimensions = map[string]int64{"length": 1}
		},
		"complete":        func(r *request.Request) { r.Output.Complete = true },
		"prefix":          func(r *request.Request) { r.Output.NodeNamePrefix = "left_" },
		"another prefix":  func(r *request.Request) { r.Output.NodeNamePrefix = "right_" },
		"weights outside": func(r *request.Request) { r.Output.InitializersFile = "rest.bin" },
		"another file":    func(r *request.Request) { r.Output.InitializersFile = "weights.bin" },
		"large ones only": func(r *request.Request) {
			r.Output = identity.Output{InitializersFile: "rest.bin", InitializersThreshold: 100}
		},
		"in the source": func(r *request.Request) { r.Output.InitializersInSource = true },
	}
	seen := map[index.RequestKey]string{plain: "plain"}
	for name, change := range other {
		k := key(change)
		require.Empty(t, seen[k], "%s has the key of another", name)
		seen[k] = name
	}
}

// ONNX Runtime compares denotations without case.
func TestDenotationsInOtherLetters(t *testing.T) {
	b := newBench(t)
	key := func(sizes map[string]int64) index.RequestKey {
		r := b.request(b.model(1))
		r.OnMiss, r.FreeDimensionsByDenotation = request.KeyOnly, sizes
		return b.acquire(r).RequestKey
	}
	require.Equal(t, key(map[string]int64{"DATA_BATCH": 2}), key(map[string]int64{"data_batch": 2}))
	require.NotEqual(t, key(map[string]int64{"DATA_BATCH": 2}),
		key(map[string]int64{"DATA_CHANNEL": 2}))
	r := b.request(b.model(1))
	r.FreeDimensionsByDenotation = map[string]int64{"DATA_BATCH": 2, "data_batch": 3}
	require.Equal(t, apierr.BadRequest, b.refused(r).Class)
}

// A build's record means the request that it was made for, however that was spelled.
func TestARecordMeansItsRequest(t *testing.T) {
	b := newBench(t)
	for name, change := range map[string]func(*request.Request){
		"plain":  func(*request.Request) {},
		"device": func(r *request.Request) { r.EPs[0].Devices = devices("cpu") },
		"options": func(r *request.Request) {
			r.EPs[0].Options = map[string]string{"level": "03", "fast": "True", "hardware": "sim-9"}
		},
		"session": func(r *request.Request) {
			r.SessionOptions = map[string]string{"session.disable_quant_qdq": "True"}
		},
		"dimension": func(r *request.Request) { r.FreeDimensions = map[string]int64{"n": 3} },
		"by meaning": func(r *request.Request) {
			r.FreeDimensionsByDenotation = map[string]int64{"n": 3}
		},
		"level":    func(r *request.Request) { r.GraphOptimizationLevel = "disable_all" },
		"embedded": func(r *request.Request) { r.Embed = true },
		"route":    func(r *request.Request) { r.Route = "session_options" },
		"output": func(r *request.Request) {
			r.Output = identity.Output{InitializersFile: "rest.bin", InitializersThreshold: 9}
		},
		"in source": func(r *request.Request) {
			r.Output = identity.Output{InitializersInSource: true}
		},
		"complete": func(r *request.Request) {
			r.Output = identity.Output{Complete: true,
				NodeNamePrefix: "left_"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := b.request(b.model(1))
			change(r)
			build := b.acquire(r).Build
			again, err := workspace.AttemptOf(build)
			require.NoError(t, err)
			_, rc, err := b.cache.runtimes.Resolve(context.Background(), again.RuntimeWanted(),
				func(string) {})
			require.NoError(t, err)
			planned, err := b.cache.planner.WithPlan(context.Background(),
				again.WithRuntime("", rc))
			require.NoError(t, err)
			require.Equal(t, build.RequestKey, planned.Plan.RequestKey)
			require.Equal(t, build.BuildKey, planned.Plan.BuildKey)
			require.Equal(t, build.Record, planned.Plan.Record)
		})
	}
}
