package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
)

// driven returns a cache with rules that have a verdict on builds of a later driver, and a function
// that sets the driver's version.
func driven(t *testing.T, verdict string) (*bench, func(version string)) {
	set, err := rules.Parse("own.toml",
		[]byte("[[ep."+standin.EP+".rule]]\nname = \"older driver\"\nwhen.driver_version = "+
			"\"build > runtime\"\nverdict = \""+
			verdict+"\"\nreason = \"{build.driver_version} is later\"\n"))
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "version")
	b := newBench(t)
	b.close()
	b.change = func(o *Options) { o.Rules = set.Overriding(rules.Shipped()) }
	b.drivers = []runtimes.DriverSource{{EP: standin.EP, File: file}}
	driver := func(version string) {
		require.NoError(t, os.WriteFile(file, []byte(version+"\n"), 0o644))
		if b.cache != nil {
			b.cache.runtimes.WatchMachine(context.Background())
		}
	}
	driver("32.0.1")
	b.open()
	return b, driver
}

// The driver is not part of the key. A build made with one is kept when a build is made with
// another.
func TestBuildsOfTwoDriversSideBySide(t *testing.T) {
	b, driver := driven(t, "unsupported")
	later := b.acquire(b.request(b.model(1)))
	driver("31.0.1")
	earlier := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Compiled, earlier.Outcome)
	require.Contains(t, earlier.Why, "32.0.1 is later")
	require.Equal(t, later.Build.BuildKey, earlier.Build.BuildKey)
	driver("32.0.1")
	back := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, back.Outcome)
	require.Equal(t, later.Build.ID, back.Build.ID)

	r := b.request(b.model(1))
	r.OnMiss = request.Refresh
	b.acquire(r)
	require.Len(t, b.list(), 2, "of each driver one is enough")
}

// Where a rule does not know whether the driver will do, the build is tried, though the very
// library made it.
func TestADriverThatMayNotDoIsTried(t *testing.T) {
	b, driver := driven(t, "unknown")
	first := b.acquire(b.request(b.model(1)))
	driver("31.0.1")
	a := b.acquire(b.request(b.model(1)))
	require.Equal(t, first.Build.ID, a.Build.ID)
	require.Equal(t, judge.SourceLoadCheck, a.Compatibility.Source)
	require.Equal(t, compilers.PreferRecompilation, a.Compatibility.Verdict)
	require.Contains(t, a.Compatibility.Reason, "32.0.1 is later")
}

// An equal library with another driver: the execution provider has no verdict, so the build is
// loaded, once.
func TestAnotherDriverIsTriedOnce(t *testing.T) {
	for name, c := range map[string]struct{ load, outcome string }{
		"loads":         {compilers.Passed, request.Hit},
		"does not load": {compilers.Failed, request.Compiled},
	} {
		t.Run(name, func(t *testing.T) {
			o := &opinion{load: c.load}
			b := newOpinion(t, o, request.Policy{})
			b.close()
			file := filepath.Join(t.TempDir(), "version")
			require.NoError(t, os.WriteFile(file, []byte("1.0\n"), 0o644))
			b.drivers = []runtimes.DriverSource{{EP: standin.EP, File: file}}
			b.open()
			first := b.acquire(b.request(b.model(1)))
			checks := o.checks.Load()
			require.NoError(t, os.WriteFile(file, []byte("2.0\n"), 0o644))
			b.cache.runtimes.WatchMachine(t.Context())
			a := b.acquire(b.request(b.model(1)))
			require.Equal(t, c.outcome, a.Outcome)
			require.Positive(t, o.Verdicts.Load(), "it was asked")
			require.Greater(t, o.checks.Load(), checks)
			checks = o.checks.Load()
			again := b.acquire(b.request(b.model(1)))
			require.Equal(t, request.Hit, again.Outcome)
			require.Equal(t, compilers.Optimal, again.Compatibility.Verdict)
			require.Equal(t, c.outcome == request.Hit, again.Build.ID == first.Build.ID)
			require.Equal(t, checks, o.checks.Load())
		})
	}
}

// In the middle of a compile the driver is another one: what was made is said of neither.
func TestAnotherDriverDuringACompile(t *testing.T) {
	b, driver := driven(t, "unsupported")
	b.close()
	b.wrap = &interrupted{Compiler: b.compiler, during: func() { driver("31.0.1") }}
	b.open()
	a := b.acquire(b.request(b.model(1)))
	require.Equal(t, "31.0.1", a.Build.EPs[0].DriverVersion)
	require.Len(t, b.list(), 1)
}

// A command that fails now and then does not make the driver another one, and the doctor reports
// it.
func TestUnreadableDriverVersionKeepsTheLastOne(t *testing.T) {
	b, _ := driven(t, "unsupported")
	b.close()
	dir := t.TempDir()
	version := filepath.Join(dir, "version")
	require.NoError(t, os.WriteFile(version, []byte("32.0.1\n"), 0o644))
	b.drivers = []runtimes.DriverSource{{EP: standin.EP, Command: []string{"/bin/cat", version}}}
	b.open()
	first := b.acquire(b.request(b.model(2)))
	require.Equal(t, "32.0.1", first.Build.EPs[0].DriverVersion)
	require.Empty(t, b.cache.Queries.Doctor().DriverAdvice())

	require.NoError(t, os.Remove(version))
	b.cache.runtimes.WatchMachine(t.Context())
	again := b.acquire(b.request(b.model(2)))
	require.Equal(t, request.Hit, again.Outcome)
	advice := b.cache.Queries.Doctor().DriverAdvice()
	require.Len(t, advice, 1)
	require.Contains(t, advice[0].Text, version)
}

// Open does not wait for a command, but what depends on its answer does.
func TestOpenDoesNotWaitForADriversVersion(t *testing.T) {
	b, _ := driven(t, "unsupported")
	b.close()
	dir := t.TempDir()
	gate := filepath.Join(dir, "gate")
	b.drivers = []runtimes.DriverSource{{EP: standin.EP,
		Command: []string{"/bin/sh", "-c", "while ! test -e " + gate +
			"; do sleep 0.01; done; echo 33.0.1"}}}
	b.open()
	require.NoError(t, os.WriteFile(gate, nil, 0o644))
	require.Equal(t, "33.0.1", b.acquire(b.request(b.model(3))).Build.EPs[0].DriverVersion)
}

// Before the daemon knows the drivers' versions a request waits for them, and no longer than its
// deadline.
func TestARequestDoesNotOutlastItsDeadlineForADriver(t *testing.T) {
	b := newBench(t)
	b.close()
	b.drivers = []runtimes.DriverSource{{EP: standin.EP, Command: []string{"sleep", "60"}}}
	b.open()
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err := b.cache.Acquire(ctx, b.request(b.model(1)), nil)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Less(t, time.Since(began), 2*time.Second)
}
