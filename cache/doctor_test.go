package cache

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
)

func (b *bench) doctor(p request.Peer) (out []query.Advice) {
	b.Helper()
	reply, err := b.cache.Queries.Doctor().Examine(context.Background(), p)
	require.NoError(b, err)
	for _, a := range reply.Advice {
		out = append(out,
			query.Advice{Severity: a.Severity, Subject: a.Subject, Text: a.Text, Hint: a.Hint})
		require.Contains(b, []string{query.SeverityProblem, query.SeverityWarning,
			query.SeverityInfo, query.SeverityOK}, a.Severity)
		require.NotEmpty(b, a.Text)
		if a.Severity != query.SeverityOK {
			require.NotEmpty(b, a.Hint, "%s: %s: and what is to be done?", a.Subject, a.Text)
		}
	}
	return out
}

// adviceOn returns the only advice on a subject.
func adviceOn(t testing.TB, list []query.Advice, subject string) query.Advice {
	t.Helper()
	var out []query.Advice
	for _, a := range list {
		if a.Subject == subject {
			out = append(out, a)
		}
	}
	require.Len(t, out, 1, "%q among %v", subject, list)
	return out[0]
}

func TestDoctorFindsNothingWhereAllIsWell(t *testing.T) {
	b := newBench(t)
	b.acquire(b.request(b.model(1)))
	list := b.doctor(b.self())
	for _, subject := range []string{"runtime " + b.runtime + " " + standin.EP, "clock", "index",
		"builds", "compiles"} {
		require.Equal(t, query.SeverityOK, adviceOn(t, list, subject).Severity, "%v",
			adviceOn(t, list, subject))
	}
	compiles := b.compiler.Compiles.Load()
	b.doctor(b.self())
	require.Equal(t, compiles, b.compiler.Compiles.Load(),
		"what was tried a moment ago is not tried again")
}

// The result of the fingerprint need not hold in this process.
func TestDoctorTriesToLoad(t *testing.T) {
	b := newBench(t)
	b.acquire(b.request(b.model(1)))
	b.compiler.CheckFault = func(compilers.CheckJob) *compilers.CheckResult {
		return &compilers.CheckResult{Outcome: compilers.Failed, Code: 11,
			Text: "plugin.cpp:54: can't protect"}
	}
	a := adviceOn(t, b.doctor(b.self()), "runtime "+b.runtime+" "+standin.EP)
	require.Equal(t, query.SeverityProblem, a.Severity)
	require.Contains(t, a.Hint, "MemoryDenyWriteExecute")
}

func TestDoctorOnRuntimes(t *testing.T) {
	for _, c := range []struct {
		name    string
		spoil   func(b *bench)
		subject string // after the runtime's name
		text    string
		hint    string
	}{
		{"gone", func(b *bench) { require.NoError(b, os.RemoveAll(b.runtime)) }, "", "no such file",
			"install it again"},
		{"without an EP", func(b *bench) { require.NoError(b, os.Remove(b.epLibrary())) }, "",
			"EP library", "install it again"},
		{"one that does not load",
			func(b *bench) {
				require.NoError(b,
					os.WriteFile(b.epLibrary(), []byte("garbage"), 0o644))
			},
			" " + standin.EP, "does not load with ONNX Runtime 1.31.1",
			"may not fit this ONNX Runtime"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			c.spoil(b)
			a := adviceOn(t, b.doctor(b.self()), "runtime "+b.runtime+c.subject)
			require.Equal(t, query.SeverityProblem, a.Severity)
			require.Contains(t, a.Text, c.text)
			require.Contains(t, a.Hint, c.hint)
		})
	}
}

func (b *bench) epLibrary() string {
	found, err := filepath.Glob(filepath.Join(b.runtime, "libonnxruntime_providers_*.so"))
	require.NoError(b, err)
	require.Len(b, found, 1)
	return found[0]
}

func TestDoctorWithoutRuntimes(t *testing.T) {
	b := newBench(t)
	b.cache.runtimes.Register(nil)
	a := adviceOn(t, b.doctor(b.self()), "runtimes")
	require.Equal(t, query.SeverityProblem, a.Severity)
	require.Contains(t, a.Hint, "--runtime")
}

func TestDoctorOnTheClock(t *testing.T) {
	b := newBench(t)
	b.acquire(b.request(b.model(1)))
	b.later.Store(int64(-2 * time.Hour))
	a := adviceOn(t, b.doctor(b.self()), "clock")
	require.Equal(t, query.SeverityWarning, a.Severity)
	require.Contains(t, a.Text, "ahead of the clock")
}

func TestDoctorReportsRecentFailures(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	require.NoError(t, os.Remove(b.blob(a)))
	b.refused(
		func() *request.Request { r := b.request(b.model(1)); r.OnMiss = request.Fail; return r }())
	for seed := range 3 {
		r := b.request(b.model(2 + uint64(seed)))
		r.EPs[0].Options = map[string]string{"fault": string(standin.Refuse)}
		b.refused(r)
	}
	list := b.doctor(b.self())
	require.Contains(t, adviceOn(t, list, "damage").Text, "in the last day: 1")
	require.Contains(t, adviceOn(t, list, "compiles").Text, "told to refuse")
	require.NotContains(t, adviceOn(t, b.doctor(request.Peer{UID: 2001}), "compiles").Text,
		"refuse",
		"whose models fail is nobody's business")

	b.close()
	require.NoError(t, os.WriteFile(filepath.Join(b.state, "journal"), []byte("garbage"), 0o600))
	b.open()
	require.Contains(t, adviceOn(t, b.doctor(b.self()), "index").Text, "damaged journal")
	// or it would be found as damaged and served when the test ends
	b.acquire(b.request(b.model(1)))
}

func TestDoctorOnWatching(t *testing.T) {
	b := newBench(t)
	require.Equal(t, query.SeverityOK, adviceOn(t, b.doctor(b.self()), "watching").Severity)
}

func TestDoctorIsCancelled(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := b.cache.Queries.Doctor().Examine(ctx, b.self())
	require.True(t, errors.Is(err, context.Canceled), "%v", err)
}

func TestCancelledCompileIsNoFailure(t *testing.T) {
	b, g := jobbing(t, 4)
	var ids []string
	for seed := range uint64(4) {
		ids = append(ids, b.later1(seed+1, somebody).Job)
	}
	b.begins(g, 4)
	_, err := b.cache.JobList.Cancel(context.Background(), request.Peer{UID: somebody}, ids, false)
	require.NoError(t, err)
	kinds := make(map[string]int)
	for _, e := range b.events(request.Peer{UID: somebody}) {
		kinds[e.Kind]++
	}
	require.Equal(t, 4, kinds[event.Cancelled])
	require.Zero(t, kinds[event.Failed])
	// the rest compiles something, and compiles wait here
	a := adviceOn(t, b.cache.Queries.Doctor().LatelyAdvice(b.self()), "compiles")
	require.Equal(t, query.SeverityOK, a.Severity, a.Text)
	require.Contains(t, a.Text, "0 failed")
}

// Counts of all users would show one user when others compile, and how large their builds are.
func TestDoctorTellsUsersNothingOfOthers(t *testing.T) {
	b := newBenchWith(t, withSpace(store.SpaceOptions{Budget: store.Amount{Bytes: 1 << 30}}))
	advice := func(uid uint32) (out []query.Advice) {
		for _, a := range b.doctor(request.Peer{UID: uid}) {
			if slices.Contains([]string{"space", "builds", "compiles", "damage"}, a.Subject) {
				out = append(out, a)
			}
		}
		return out
	}
	before, all := advice(2001), advice(b.cache.uid)
	private := b.others(2002, 1)
	private.Store = "user"
	b.acquire(private)
	require.Equal(t, before, advice(2001))
	require.NotEqual(t, all, advice(b.cache.uid))
	require.NotEqual(t, before, advice(2002), "that user sees its own compile")
}

func TestAbandonedCompileIsNoFailure(t *testing.T) {
	b, g := jobbing(t, 4)
	ctx, leave := context.WithCancel(context.Background())
	var asked []<-chan got
	for seed := range uint64(4) {
		asked = append(asked, b.ask(ctx, b.request(b.model(seed+1))))
	}
	b.begins(g, 4)
	leave()
	for _, one := range asked {
		require.Equal(t, apierr.Cancelled, apierr.ClassOf((<-one).err))
	}
	require.Eventually(t, func() bool { return b.cache.jobs.Count() == 0 }, soon, time.Millisecond)
	require.Zero(t, b.cache.index.Counters.All()["failures"])
	a := adviceOn(t, b.cache.Queries.Doctor().LatelyAdvice(b.self()), "compiles")
	require.Equal(t, query.SeverityOK, a.Severity, a.Text)
	require.Contains(t, a.Text, "0 failed")
	for _, past := range b.cache.jobs.ListWithEnded() {
		require.True(t, past.Description().Inquiry ||
			past.Info().State == jobs.Cancelled, past.Info().State)
	}
}
