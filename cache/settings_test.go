package cache

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// reload applies the bench's options with the changes.
func (b *bench) reload(change func(*Options)) {
	b.Helper()
	o := b.options()
	change(&o)
	require.NoError(b, b.cache.Reload(o))
}

// ruling is a set with one rule for the stand-in, over the shipped ones.
func ruling(t testing.TB, verdict string) *rules.Set {
	t.Helper()
	set, err := rules.Parse("own.toml",
		[]byte("[[ep."+standin.EP+".rule]]\nname = \"own\"\nverdict = \""+verdict+
			"\"\nreason = \"we say so\"\n"))
	require.NoError(t, err)
	return set.Overriding(rules.Shipped())
}

func TestOtherRulesChangeTheNextAnswer(t *testing.T) {
	b := newOpinion(t, &opinion{load: compilers.Passed}, request.Policy{})
	first := b.acquire(b.request(b.model(1)))
	b.library("2.0")
	require.Equal(t, judge.SourceLoadCheck, b.acquire(b.request(b.model(1))).Compatibility.Source)

	b.reload(func(o *Options) { o.Rules = ruling(t, "optimal") })
	loaded := b.acquire(b.request(b.model(1)))
	require.Equal(t, first.Build.ID, loaded.Build.ID)
	require.Equal(t, compilers.Optimal, loaded.Compatibility.Verdict)
	require.Contains(t, loaded.Compatibility.Reason, "we say so")
	require.Eventually(t,
		func() bool { return b.list()[0].row.Compatibility == compilers.Optimal.String() }, soon,
		time.Millisecond)

	b.reload(func(o *Options) { o.Rules = ruling(t, "unsupported") })
	r := b.request(b.model(1))
	r.OnMiss = request.Fail
	e := b.refused(r)
	require.Equal(t, apierr.Stale, e.Class)
	require.Contains(t, e.Text, "we say so")
}

// Builds that are not requested are judged again as well, with an event.
func TestOtherRulesAreAppliedInTheBackground(t *testing.T) {
	b := newOpinion(t, &opinion{load: compilers.Passed}, request.Policy{})
	b.acquire(b.request(b.model(1)))
	b.assessed(func(runtimes.Facts) bool { return true }) // otherwise 2.0 may be no change
	b.library("2.0")
	b.assessed(func(f runtimes.Facts) bool { return len(f.Changes) > 0 })
	b.reload(func(o *Options) { o.Rules = ruling(t, "unsupported") })
	require.Eventually(t,
		func() bool { return b.list()[0].row.CompatibilitySource == judge.SourceRule+"own" }, soon,
		time.Millisecond)
	require.Equal(t, compilers.Unsupported.String(), b.list()[0].row.Compatibility)
	require.Eventually(t, func() bool {
		return slices.ContainsFunc(b.events(b.self()), func(e *wire.Event) bool {
			return e.Kind == event.Judged && strings.Contains(e.Text, "we say so")
		})
	}, soon, time.Millisecond)
}

func TestOtherPoliciesChangeTheNextAnswer(t *testing.T) {
	b := newOpinion(t, &opinion{verdict: compilers.PreferRecompilation}, request.Policy{})
	b.acquire(b.request(b.model(1)))
	b.library("1.1")
	require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
	b.reload(func(o *Options) {
		o.Policies = map[string]request.Policy{"": {PreferRecompilation: request.PolicyRefuse}}
	})
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
}

func TestAllowedOptionsFollow(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	r.SessionOptions = map[string]string{"session.unheard_of": "1"}
	before := b.refused(r)
	b.reload(func(o *Options) { o.AllowOptions = []string{"session/session.unheard_of"} })
	require.Equal(t, request.Compiled, b.acquire(r).Outcome)
	require.Equal(t, request.Hit, b.acquire(r).Outcome)
	b.reload(func(*Options) {})
	require.Equal(t, before.Text, b.refused(r).Text,
		"also where the request was thought through before")
}

func TestAdministratorsFollow(t *testing.T) {
	b := newBench(t)
	other := request.Peer{UID: 2001}
	require.False(t, b.cache.Rights.IsAdministrator(other))
	b.reload(func(o *Options) { o.Administrators = []uint32{2001} })
	require.True(t, b.cache.Rights.IsAdministrator(other))
	b.reload(func(*Options) {})
	require.False(t, b.cache.Rights.IsAdministrator(other))
}

func TestRebuildsFollow(t *testing.T) {
	b := newBench(t) // without rebuilds
	build := b.acquire(b.request(b.model(1))).Build
	b.want(build, "first")
	require.Empty(t, b.cache.rebuilds.List())
	b.reload(func(o *Options) { o.Rebuild = upkeep.RebuildOptions{Jobs: 2, CPUShare: 1} })
	b.want(build, "second")
	b.waitForRebuilds()
	b.reload(func(o *Options) { o.Rebuild = upkeep.RebuildOptions{Off: true} })
	require.Empty(t, b.cache.rebuilds.List())
	b.want(build, "third")
	require.Empty(t, b.cache.rebuilds.List())
}

func TestRuntimesFollow(t *testing.T) {
	b := newBench(t)
	b.acquire(b.request(b.model(1)))
	other := filepath.Join(t.TempDir(), "other")
	_, err := standin.Library(other, "1.31.1", standin.SDK{Version: "7.0", Hardware: "sim-1"})
	require.NoError(t, err)
	ours := compilers.Runtime{Directory: b.runtime}

	b.reload(func(o *Options) { o.Runtimes = []compilers.Runtime{{Directory: other}, ours} })
	require.Equal(t, other, b.acquire(b.request(b.model(1))).Runtime,
		"the preferred one comes first")
	require.Eventually(t,
		func() bool { return b.cache.runtimes.Watched(b.cache.runtimes.All()[0]) != "" }, soon,
		time.Millisecond)
	gone, same := b.cache.runtimes.All()[0], b.cache.runtimes.All()[1]

	b.reload(func(o *Options) { o.Runtimes = []compilers.Runtime{ours} })
	require.Equal(t, b.runtime, b.acquire(b.request(b.model(1))).Runtime)
	require.Same(t, same, b.cache.runtimes.All()[0], "what stays is not looked at again")
	require.Empty(t, b.cache.runtimes.Watched(gone))

	b.reload(func(o *Options) { o.Runtimes = nil })
	require.Equal(t, apierr.Unavailable, b.refused(b.request(b.model(1))).Class)
}

// A runtime that a client brought becomes the administrator's, and is not listed twice.
func TestRuntimeOfAClientIsRegistered(t *testing.T) {
	b := newBench(t)
	other := filepath.Join(t.TempDir(), "other")
	_, err := standin.Library(other, "1.31.1", standin.SDK{Version: "7.0", Hardware: "sim-1"})
	require.NoError(t, err)
	r := b.request(b.model(1))
	r.Runtime.Directory = other
	b.acquire(r)
	b.reload(func(o *Options) {
		o.Runtimes = append(o.Runtimes,
			compilers.Runtime{Directory: other})
	})
	all := b.cache.runtimes.All()
	require.Len(t, all, 2)
	require.True(t, all[1].Registered)
	require.Equal(t, request.Hit, b.acquire(r).Outcome)
}

func TestDriversFollow(t *testing.T) {
	b := newBench(t)
	file := filepath.Join(t.TempDir(), "version")
	require.NoError(t, os.WriteFile(file, []byte("31.0.1\n"), 0o644))
	require.Empty(t, b.acquire(b.request(b.model(1))).Build.EPs[0].DriverVersion)
	b.reload(func(o *Options) { o.Drivers = []runtimes.DriverSource{{EP: standin.EP, File: file}} })
	version := func() string {
		return b.probed().Drivers[standin.EP].Version
	}
	require.Eventually(t, func() bool { return version() == "31.0.1" }, soon, time.Millisecond)
	require.NoError(t, os.WriteFile(file, []byte("32.0.1\n"), 0o644))
	require.Eventually(t, func() bool { return version() == "32.0.1" }, soon, time.Millisecond,
		"the file is watched")
	b.reload(func(*Options) {})
	require.Eventually(t, func() bool { return version() == "" }, soon, time.Millisecond)
}

func TestWrongOptionsChangeNothing(t *testing.T) {
	b := newBench(t)
	before := b.cache.settings.Load()
	o := b.options()
	o.Administrators, o.Rebuild.Window = []uint32{2001}, "late"
	require.ErrorContains(t, b.cache.Reload(o), "late")
	require.Same(t, before, b.cache.settings.Load())
	o.Rebuild.Window, o.KeepSource = "", "some"
	require.ErrorContains(t, b.cache.Reload(o), "some")
	require.Same(t, before, b.cache.settings.Load())
}

// Reloading the same rules keeps all judgements.
func TestSameRulesKeepJudgements(t *testing.T) {
	b := newBench(t)
	b.reload(func(o *Options) { o.Rules = ruling(t, "optimal") })
	before := b.cache.settings.Load().judging
	b.reload(func(o *Options) { o.Rules = ruling(t, "optimal") })
	require.Equal(t, before, b.cache.settings.Load().judging)
	b.reload(func(o *Options) { o.Rules = ruling(t, "unsupported") })
	require.Greater(t, b.cache.settings.Load().judging, before)
}

func TestPendingSettingsAreReported(t *testing.T) {
	b := newBench(t)
	require.Equal(t, query.SeverityOK, adviceOn(t, b.doctor(b.self()), "configuration").Severity)
	b.cache.SetConfigured(query.Configured{Refused: []string{"rules.toml:3:1: no such verdict"},
		Waiting: []string{"jobs"}})
	status, err := b.cache.Queries.Status(context.Background(), b.self())
	require.NoError(t, err)
	require.Contains(t, status.Warnings[0], "rules.toml:3:1: no such verdict")
	require.Contains(t, status.Warnings[1], "jobs")
	b.cache.SetConfigured(query.Configured{Refused: []string{"rules.toml:3:1: no such verdict"}})
	a := adviceOn(t, b.doctor(b.self()), "configuration")
	require.Equal(t, query.SeverityProblem, a.Severity)
	require.Contains(t, a.Text, "rules.toml:3:1")
	b.cache.SetConfigured(query.Configured{Waiting: []string{"jobs"}})
	require.Contains(t, adviceOn(t, b.doctor(b.self()), "configuration").Text, "jobs")
	b.cache.SetConfigured(query.Configured{})
	require.Equal(t, query.SeverityOK, adviceOn(t, b.doctor(b.self()), "configuration").Severity)
}
