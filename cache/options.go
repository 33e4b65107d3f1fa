package cache

import (
	"cmp"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/layer"
	"github.com/epcached/epcached/cache/remotes"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/store"
)

// Options say how a cache is kept. The zero value of each field is a sensible default.
type Options struct {
	Compiler compilers.Compiler
	// Runtimes are registered by the administrator, in order of preference. In one with only
	// Directory set, libraries are found.
	Runtimes []compilers.Runtime
	// AllowOptions are "EP/option" and "session/key": unknown options that are passed on.
	AllowOptions []string
	Jobs         int // compiles at the same time; 0: one per processor
	// JobsMemory is how many bytes compiles may take together, as far as it is known. 0: half of
	// the machine's memory; negative: no bound.
	JobsMemory int64
	// every local user may reach shared views by path, not only by descriptor
	PathAccess     bool
	Administrators []uint32 // besides root and the daemon's own user

	Rules   *rules.Set // how builds of other libraries suit a runtime; nil: the shipped ones
	Drivers []runtimes.DriverSource
	Quiet   time.Duration // a runtime's files must rest so long after a change; 0: 1 s
	// how often files that cannot be watched are looked at; 0: 2 s
	Poll     time.Duration
	Policies map[string]request.Policy // by execution provider; "" for all without their own
	Rebuild  upkeep.RebuildOptions

	KeepSource       string   // how source models are kept: "reference" (default), "copy", "none"
	TrustedReporters []uint32 // users that need no others to confirm their reports
	Publishers       []uint32 // users that may put shared builds, besides administrators
	// users with reports that withhold a build that cannot be checked; 0: 3
	ReportQuorum int
	Claims       claims.Limits
	Remotes      []remotes.Remote // in the order in which they are asked
	// WarnExpired: builds of other machines are taken without a trust document that is in effect.
	WarnExpired bool
	Failures    failure.Options

	Space     store.SpaceOptions
	Pack      string        // store.PackCold (default), store.PackAlways or store.PackOff
	PackAfter time.Duration // without use, also until an unpacked copy is dropped; 0: two hours
	Verify    time.Duration // in which all stored bytes are read and compared once; 0: never
	// for copies of packed builds, perhaps in memory; "": the state directory
	UnpackedDir string
	Layers      []layer.Source
	Rebuilt     string // why this process opens the state directory again; "": it does not
	// Conditions are the configuration that compiles depend on, in any words: a model that failed
	// to compile under others is tried again.
	Conditions string

	// OnOpening is called every few seconds with the progress while Open makes the index from all
	// manifests, which takes long. It must not wait. It may be nil.
	OnOpening func(what string)

	// OnBroken is called once if the index turns out to be damaged after Open: no request can be
	// answered from then on, and Close may block. The process should end, because its next start
	// makes the index again. OnBroken must not wait. It may be nil.
	OnBroken func(error)

	// which makes the calls to remotes; nil: there are none. Close closes it
	RemoteClient remotes.Client

	Log *slog.Logger
	Now func() time.Time // nil: time.Now

	fs cas.FS // nil: the operating system's
}

// settings are the options that may change while the cache is open. They are replaced as a whole,
// and never changed: code that needs several that belong together loads them once.
type settings struct {
	Options // with the defaults filled in
	rebuild upkeep.Limits
	builder build.Settings
	store   store.Settings

	// Remembered results are remembered with the generation that they were found out under, and do
	// not count for a later one.
	judging  uint64 // counts changes of what builds are judged by
	planning uint64 // counts changes of what plans depend on
}

// newSettings checks the options. The caller fills in the generations.
func newSettings(o *Options) (*settings, error) {
	s := &settings{Options: *o, builder: build.Settings{Failures: o.Failures.OrDefault()},
		store: store.Settings{Space: o.Space}}
	s.Claims, s.ReportQuorum = o.Claims.OrDefault(), cmp.Or(o.ReportQuorum, 3)
	if s.Rules == nil {
		s.Rules = rules.Shipped()
	}
	var err error
	if s.builder.KeepSource, err = build.CheckKeepSource(o.KeepSource); err != nil {
		return nil, err
	}
	if s.store.Pack, err = o.packWhen(); err != nil {
		return nil, err
	}
	s.store.Verify = o.Verify
	s.rebuild, err = o.Rebuild.Limits()
	return s, err
}

// Reload applies other options: Rules, Policies, Rebuild, AllowOptions, Administrators,
// TrustedReporters, Publishers, Claims, Remotes, Layers, ReportQuorum, KeepSource, Failures, Space,
// Pack, PackAfter, Verify, Drivers and Runtimes. The other options are for Open alone and are not
// looked at. Builds with other verdicts now are judged again: on their next request, and all of
// them in the background. An error leaves everything as it was.
func (c *Cache) Reload(o Options) error {
	next, err := newSettings(&o)
	if err != nil {
		return fmt.Errorf("reload: %w", err)
	}
	c.reloading.Lock()
	defer c.reloading.Unlock()
	before := c.settings.Load()
	next.judging, next.planning = before.judging, before.planning
	judging := !next.Rules.Equal(before.Rules) || !reflect.DeepEqual(next.Policies, before.Policies)
	if judging {
		next.judging++
	}
	if !slices.Equal(next.AllowOptions, before.AllowOptions) {
		next.planning++
	}
	c.settings.Store(next)
	if !slices.EqualFunc(before.Layers, next.Layers, layer.Source.Same) {
		c.Store.Layers.Use(c.layersOf(next.Layers))
	}
	c.rebuilds.ApplyLimits()
	c.remotes.Configure()
	c.Store.SetSettings(next.store)
	c.runtimes.Register(o.Runtimes)
	c.runtimes.SetDrivers(o.Drivers)
	if judging {
		c.runtimes.Reassess()
	}
	return nil
}

func (o *Options) packWhen() (p store.Packing, err error) {
	p.When, p.After = cmp.Or(o.Pack, store.PackCold), cmp.Or(o.PackAfter, store.DefaultPackAfter)
	if all := []string{store.PackCold, store.PackAlways,
		store.PackOff}; !slices.Contains(all, p.When) {
		err = fmt.Errorf("pack: %q is not one of %q, %q and %q", p.When, all[0], all[1], all[2])
	} else if p.After < 0 {
		err = fmt.Errorf("pack after %s: must not be negative", p.After)
	}
	return p, err
}

// policyOf is the strictest of the policies for the execution providers of a request.
func (c *Cache) policyOf(eps []compilers.EP) (out request.Policy) {
	policies := c.settings.Load().Policies
	for i, ep := range eps {
		p, ok := policies[ep.Name]
		if !ok {
			p = policies[""]
		}
		if i == 0 {
			out = p
		} else {
			out = out.Stricter(p)
		}
	}
	return out
}
