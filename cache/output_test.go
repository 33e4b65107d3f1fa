package cache

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/internal/apierr"
)

// A wish that is a session option as well is one wish, however it is spelled.
func TestOutputsThatAreSessionOptions(t *testing.T) {
	b := newBench(t)
	wished, spelled := b.request(b.model(1)), b.request(b.model(1))
	wished.Output = identity.Output{NodeNamePrefix: "left_", Complete: true}
	spelled.SessionOptions = map[string]string{"ep.context_node_name_prefix": "left_",
		"session.disable_cpu_ep_fallback": "True"}
	a := b.acquire(wished)
	require.Equal(t,
		map[string]string{"ep.context_node_name_prefix": "left_",
			"session.disable_cpu_ep_fallback": "1"}, a.SessionOptions, "what to load it with")
	require.Equal(t, request.Hit, b.acquire(spelled).Outcome)
	again := b.request(b.model(1))
	again.Output = identity.Output{NodeNamePrefix: "left_", Complete: true}
	require.Equal(t, request.Hit, b.acquire(again).Outcome)
}

func TestOutputsThatCannotBe(t *testing.T) {
	b := newBench(t)
	for name, change := range map[string]func(*request.Request){
		"a path": func(r *request.Request) {
			r.Output.InitializersFile = "sub/rest.bin"
		},
		"an absolute path": func(r *request.Request) {
			r.Output.InitializersFile = "/etc/passwd"
		},
		"a way out":          func(r *request.Request) { r.Output.InitializersFile = ".." },
		"a name with a line": func(r *request.Request) { r.Output.InitializersFile = "a\nb" },
		"a graph's name": func(r *request.Request) {
			r.Output.InitializersFile = "other_ctx.onnx"
		},
		"two places": func(r *request.Request) {
			r.Output = identity.Output{InitializersFile: "rest.bin", InitializersInSource: true}
		},
		"a threshold without a file": func(r *request.Request) {
			r.Output.InitializersThreshold = 1
		},
		"a negative threshold": func(r *request.Request) {
			r.Output = identity.Output{InitializersFile: "rest.bin", InitializersThreshold: -1}
		},
		"a threshold by the session": func(r *request.Request) {
			r.Route, r.Output = "session_options",
				identity.Output{InitializersFile: "rest.bin", InitializersThreshold: 1}
		},
		"the source by the session": func(r *request.Request) {
			r.Route,
				r.Output.InitializersInSource = "session_options", true
		},
		"two prefixes": func(r *request.Request) {
			r.SessionOptions, r.Output.NodeNamePrefix = map[string]string{
				"ep.context_node_name_prefix": "left_"}, "right_"
		},
		"complete, and not": func(r *request.Request) {
			r.SessionOptions, r.Output.Complete = map[string]string{
				"session.disable_cpu_ep_fallback": "0"}, true
		},
		"by a session option": func(r *request.Request) {
			r.SessionOptions = map[string]string{
				"ep.context_model_external_initializers_file_name": "rest.bin"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := b.request(b.model(1))
			change(r)
			require.Contains(t, []apierr.Class{apierr.BadRequest, apierr.NotAllowed},
				b.refused(r).Class)
			require.Zero(t, b.compiler.Compiles.Load())
		})
	}
}
