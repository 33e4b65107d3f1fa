package main

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/config"
)

func optionsOf(s *config.Settings, set *rules.Set, compiler compilers.Compiler, log *slog.Logger) cache.Options {
	budget, floor, user := s.Space.Amounts()
	o := cache.Options{
		Compiler: compiler, Runtimes: runtimesOf(s), AllowOptions: s.AllowOptions, Jobs: int(s.Jobs), JobsMemory: int64(s.JobsMemory),
		PathAccess: s.PathAccess, Administrators: s.Administrators, Rules: set, Log: log,
		Quiet: config.Seconds(s.Quiet), Poll: config.Seconds(s.Poll), KeepSource: s.KeepSource,
		Publishers: s.Publishers, Claims: claimsOf(s.Claims),
		TrustedReporters: s.TrustedReporters, ReportQuorum: int(s.ReportQuorum),
		Rebuild:  upkeep.RebuildOptions{Off: !s.Rebuild.Enabled, Jobs: int(s.Rebuild.Jobs), CPUShare: s.Rebuild.CPUShare, Window: s.Rebuild.Window},
		Policies: make(map[string]request.Policy, len(s.Policies)),
		Pack:     s.Space.Pack, PackAfter: pause(s.Space.PackAfter), UnpackedDir: s.Space.UnpackedDir,
		Space: cache.SpaceOptions{Budget: cache.Amount(budget), Floor: cache.Amount(floor),
			UserBytes: cache.Amount(user), MaxUnused: s.Space.Unused(), MaxEntries: s.Space.MaxEntries},
		Failures: failure.Options{Off: !s.Failures.Remember, Crash: pause(s.Failures.Crash),
			Limit: pause(s.Failures.Limit), Longest: pause(s.Failures.Longest), Refused: pause(s.Failures.Refused)},
		Conditions: conditions(s),
	}
	for _, d := range s.Drivers {
		o.Drivers = append(o.Drivers, runtimes.DriverSource{EP: d.EP, File: d.File, Module: d.Module, Command: d.Command})
	}
	for ep, p := range s.Policies {
		o.Policies[ep] = request.Policy{
			Unknown: p.Unknown, PreferRecompilation: p.PreferRecompilation, Unsupported: p.Unsupported,
			MaxAge: p.Age(), MinCompileSeconds: p.MinCompileSeconds, MeasureGain: &p.MeasureGain,
		}
	}
	return o
}

func runtimesOf(s *config.Settings) []compilers.Runtime {
	var out []compilers.Runtime
	for _, rt := range s.Runtimes {
		spec := compilers.Runtime{Directory: rt.Directory, ORTLibrary: rt.ORTLibrary}
		for _, ep := range slices.Sorted(maps.Keys(rt.EPLibraries)) { // the same each time: it tells whether a runtime is another
			spec.EPs = append(spec.EPs, compilers.EPLibrary{EP: ep, Path: rt.EPLibraries[ep]})
		}
		out = append(out, spec)
	}
	return out
}

func claimsOf(c config.Claims) claims.Limits {
	return claims.Limits{Deadline: config.Seconds(c.DeadlineSeconds), Bytes: int64(c.Bytes), UserBytes: int64(c.UserBytes), Open: int(c.Open)}
}

func toolsOf(s *config.Settings) []compilers.Tool {
	var out []compilers.Tool
	for i := range s.Compilers {
		out = append(out, s.Compilers[i].Tool())
	}
	return out
}

func limitsOf(l config.Limits) compilers.Limits {
	return compilers.Limits{
		Wall: config.Seconds(l.WallSeconds), CPU: config.Seconds(l.CPUSeconds),
		Memory: int64(l.MemoryBytes), Output: int64(l.OutputBytes), Files: int(l.OutputFiles), OpenFiles: int64(l.OpenFiles),
		Processes: int64(l.Processes), Stack: int64(l.StackBytes), Nice: int(l.Nice),
	}
}

func sandboxOf(s config.Sandbox) compilers.SandboxOptions {
	return compilers.SandboxOptions{Network: s.Network, Read: s.Read, Write: s.Write, NoNamespaces: !s.Namespaces}
}

// pause reads what was found right when the configuration was read.
func pause(text string) time.Duration {
	d, _ := config.ParseDuration(text)
	return d // 0 is the cache's default
}

// conditions are what of the daemon a compile's outcome depends on: what failed under others is tried again.
func conditions(s *config.Settings) string {
	limits := limitsOf(s.Limits)
	limits.Nice = 0 // decides how long it takes, and not what comes of it
	return strings.Join([]string{version, fmt.Sprintf("%+v %+v", limits, sandboxOf(s.Sandbox)), s.Worker, s.WorkerUser}, "\n")
}

// workerUser gives the user that workers run as, nil for the daemon's own. It finds out now what would fail each compile later.
func workerUser(s *config.Settings, worker string) (*compilers.Credential, error) {
	if s.WorkerUser == "" {
		return nil, nil
	}
	wrong := func(err error) error {
		return usageError{fmt.Errorf("configuration: worker_user %q: %w", s.WorkerUser, err)}
	}
	c, err := compilers.LookUpUser(s.WorkerUser)
	if err != nil {
		return nil, wrong(err)
	}
	switch {
	case int(c.UID) == os.Geteuid():
		return nil, nil
	case os.Geteuid() != 0:
		return nil, wrong(errors.New("only a daemon that runs as root can start workers as another user"))
	case c.GID == 0:
		return nil, wrong(errors.New("root's group is no group for workers"))
	}
	paths := []string{filepath.Join(s.State, "staging"), worker}
	for _, rt := range s.Runtimes {
		paths = append(paths, rt.Directory, rt.ORTLibrary)
		for _, library := range rt.EPLibraries {
			paths = append(paths, library)
		}
	}
	for _, path := range paths {
		if err := c.CanPass(path); err != nil {
			return nil, wrong(err)
		}
	}
	if err := c.CanRun(worker); err != nil {
		return nil, wrong(err)
	}
	return c, nil
}
