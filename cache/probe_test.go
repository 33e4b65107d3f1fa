package cache

import (
	"context"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/internal/apierr"
)

// ailing is a compiler with execution providers that do not load for the time being, because a
// driver's library is missing.
type ailing struct {
	*standin.Compiler
	ill atomic.Bool
}

func (a *ailing) Probe(ctx context.Context, r compilers.Runtime) (compilers.Facts, error) {
	facts, err := a.Compiler.Probe(ctx, r)
	if a.ill.Load() {
		for i := range facts.EPs {
			facts.EPs[i].Devices, facts.EPs[i].Error = nil,
				r.EPs[i].Path+": libdriver.so: no such file"
		}
	}
	return facts, err
}

func newAiling(t *testing.T) (*bench, *ailing) {
	a := new(ailing)
	a.ill.Store(true)
	b := newBenchOf(t, func(c *standin.Compiler) compilers.Compiler {
		a.Compiler = c
		return a
	})
	return b, a
}

func TestFailedProbeIsTriedAgain(t *testing.T) {
	b, a := newAiling(t)
	r := b.request(b.model(1))
	e := b.refused(r)
	require.Equal(t, apierr.Unavailable, e.Class)
	require.Contains(t, e.Text, "libdriver.so")
	probes := a.Probes.Load()
	b.refused(r)
	require.Equal(t, probes, a.Probes.Load(),
		"a library that crashes does not do so for each request")

	a.ill.Store(false)
	b.later.Store(int64(runtimes.FailureLifetime + time.Second))
	require.Equal(t, request.Compiled, b.acquire(r).Outcome)
}

func TestFailedProbeDoesNotOutliveTheDaemon(t *testing.T) {
	b, a := newAiling(t)
	b.refused(b.request(b.model(1)))
	a.ill.Store(false)
	b.reopen()
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
}

// Two runtimes may have equal libraries, and only one of them an ONNX Runtime that can load it.
func TestFailedProbeIsOfOneRuntime(t *testing.T) {
	b, _ := newAiling(t)
	b.refused(b.request(b.model(1)))
	other := filepath.Join(t.TempDir(), "other")
	_, err := standin.Library(other, "1.31.1", standin.SDK{Version: "1.0", Hardware: "sim-1"})
	require.NoError(t, err)
	r := b.request(b.model(1))
	r.Runtime.Directory = other
	require.Contains(t, b.refused(r).Text, other)
}

// crashing has execution providers that crash over the smallest model.
type crashing struct {
	*standin.Compiler
	well atomic.Bool
}

func (c *crashing) Fingerprint(ctx context.Context, r compilers.Runtime, eps []compilers.EP,
	own *compilers.Job) ([]compilers.Fingerprint, error) {
	prints, err := c.Compiler.Fingerprint(ctx, r, eps, own)
	if !c.well.Load() {
		return nil,
			&compilers.ExitError{Compiler: standin.EP, Signal: "segmentation fault",
				Name: "SIGSEGV", Code: -1}
	}
	return prints, err
}

func TestOptionsThatCrashDoNotCrashEachTime(t *testing.T) {
	c := new(crashing)
	b := newBenchOf(t, func(s *standin.Compiler) compilers.Compiler {
		c.Compiler = s
		return c
	})
	for range 3 {
		require.Contains(t, b.refused(b.request(b.model(1))).Text, "compiler crashed (SIGSEGV)")
	}
	require.EqualValues(t, 1, c.Fingerprints.Load())
	c.well.Store(true)
	b.waits(runtimes.FailureLifetime + time.Second)
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
}

func TestProcessorsAreShared(t *testing.T) {
	cpu, npu := compilers.DeviceFacts{Type: "CPU"}, compilers.DeviceFacts{Type: "NPU"}
	facts := compilers.Facts{EPs: []compilers.EPProbe{
		{Name: "processor", Devices: []compilers.DeviceFacts{cpu}},
		{Name: "both", Devices: []compilers.DeviceFacts{cpu, npu}},
		{Name: "none"},
	}}
	elsewhere := []compilers.Device{{Metadata: map[string]string{compilers.IsVirtual: "1"}}}
	for name, c := range map[string]struct {
		eps  []compilers.EP
		want bool
	}{
		"the processor": {[]compilers.EP{{Name: "processor"}}, true},
		"a device that is not asked for": {[]compilers.EP{{Name: "both",
			Devices: []compilers.Device{{Type: "CPU"}}}}, false},
		"one of several":     {[]compilers.EP{{Name: "processor"}, {Name: "both"}}, false},
		"a device elsewhere": {[]compilers.EP{{Name: "processor", Devices: elsewhere}}, false},
		"nothing listed":     {[]compilers.EP{{Name: "none"}}, false},
		"not probed":         {[]compilers.EP{{Name: "other"}}, false},
	} {
		t.Run(name,
			func(t *testing.T) { require.Equal(t, c.want, runtimes.OnlyProcessors(facts, c.eps)) })
	}
}
