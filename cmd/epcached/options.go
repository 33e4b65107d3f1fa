package main

import (
	"log/slog"
	"maps"
	"slices"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/config"
)

// optionsOf says in the cache's terms what the configuration says in an administrator's.
func optionsOf(s *config.Settings, set *rules.Set, compiler compilers.Compiler, log *slog.Logger) cache.Options {
	o := cache.Options{
		Compiler: compiler, Runtimes: runtimesOf(s), AllowOptions: s.AllowOptions, Jobs: int(s.Jobs), JobsMemory: int64(s.JobsMemory),
		PathAccess: s.PathAccess, Administrators: s.Administrators, Rules: set, Log: log,
		Quiet: config.Seconds(s.Quiet), Poll: config.Seconds(s.Poll), KeepSource: s.KeepSource,
		Publishers: s.Publishers, Claims: claimsOf(s.Claims),
		TrustedReporters: s.TrustedReporters, ReportQuorum: int(s.ReportQuorum),
		Rebuild:  upkeep.RebuildOptions{Off: !s.Rebuild.Enabled, Jobs: int(s.Rebuild.Jobs), CPUShare: s.Rebuild.CPUShare, Window: s.Rebuild.Window},
		Policies: make(map[string]cache.Policy, len(s.Policies)),
		Pack:     s.Space.Pack, PackAfter: pause(s.Space.PackAfter), UnpackedDir: s.Space.UnpackedDir,
		Space:    spaceOptions(s.Space),
		Failures: failureOptions(s.Failures), Conditions: conditions(s),
	}
	for _, d := range s.Drivers {
		o.Drivers = append(o.Drivers, runtimes.DriverSource{EP: d.EP, File: d.File, Module: d.Module, Command: d.Command})
	}
	for ep, p := range s.Policies {
		o.Policies[ep] = cache.Policy{
			Unknown: p.Unknown, PreferRecompilation: p.PreferRecompilation, Unsupported: p.Unsupported,
			MaxAge: p.Age(), MinCompileSeconds: p.MinCompileSeconds, MeasureGain: &p.MeasureGain,
		}
	}
	return o
}

func spaceOptions(s config.Space) cache.SpaceOptions {
	budget, floor, user := s.Amounts()
	return cache.SpaceOptions{Budget: cache.Amount(budget), Floor: cache.Amount(floor), UserBytes: cache.Amount(user),
		MaxUnused: s.Unused(), MaxEntries: s.MaxEntries}
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

func claimsOf(c config.Claims) cache.ClaimOptions {
	return cache.ClaimOptions{Deadline: config.Seconds(c.DeadlineSeconds), Bytes: int64(c.Bytes), UserBytes: int64(c.UserBytes), Open: int(c.Open)}
}

// toolsOf gives the vendors' own compilers.
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
