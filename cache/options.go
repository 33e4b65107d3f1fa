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

// Options configure a Cache. The zero value of each field is a sensible default.
type Options struct {
	Compiler compilers.Compiler
	// Runtimes are registered by the administrator, in order of preference. In a runtime with only
	// Directory set, the daemon searches for the libraries.
	Runtimes []compilers.Runtime
	// AllowOptions are "EP/option" and "session/key": unknown options that are passed on.
	AllowOptions []string
	Jobs         int // compiles at the same time; 0: one per processor
	// JobsMemory is how many bytes of memory all compiles may take together; a compile whose need
	// is unknown is not counted. 0: half of the machine's memory; negative: no bound.
	JobsMemory int64
	// every local user may reach shared views by path, not only by descriptor
	PathAccess     bool
	Administrators []uint32 // besides root and the daemon's own user

	Rules   *rules.Set // how builds of other libraries suit a runtime; nil: the shipped ones
	Drivers []runtimes.DriverSource
	// after a change a runtime is probed when its files have not changed for so long; 0: 1 s
	Quiet time.Duration
	// interval between checks of files that cannot be watched; 0: 2 s
	Poll     time.Duration
	Policies map[string]request.Policy // by execution provider; "" is for those without an entry
	Rebuild  upkeep.RebuildOptions

	KeepSource string   // how source models are kept: "reference" (default), "copy", "none"
	Publishers []uint32 // users that may put shared builds, besides administrators
	Claims     claims.Limits
	Remotes    []remotes.Remote // queried in this order
	Failures   failure.Options

	Space store.SpaceOptions
	Pack  string // store.PackCold (default), store.PackAlways or store.PackOff
	// a build that was not used for so long is packed, and its unpacked copy dropped; 0: two hours
	PackAfter time.Duration
	Verify    time.Duration // the period in which all stored bytes are verified once; 0: never
	Layers    []layer.Source
	Rebuilt   string // why this process opens the state directory again; "": it does not
	// Conditions is a text of the configuration that compiles depend on. A failure that was
	// remembered under another text does not count, so the model is compiled again.
	Conditions string

	// OnOpening is called every few seconds with the progress while Open makes the index from all
	// manifests, which takes long. It must not block. It may be nil.
	OnOpening func(what string)

	// OnBroken is called once if the index turns out to be damaged after Open: no request can be
	// answered from then on, and Close may block. The process should end, because its next start
	// makes the index again. OnBroken must not block. It may be nil.
	OnBroken func(error)

	// RemoteClient makes the calls to remotes; nil if there are none. Close closes it.
	RemoteClient remotes.Client

	Log *slog.Logger
	Now func() time.Time // nil: time.Now

	fs cas.FS // nil: the operating system's
}

// settings are the options that may change while the cache is open. Reload replaces the whole value
// and never changes one, so code that needs several settings that belong together loads the pointer
// once.
type settings struct {
	Options // with the defaults filled in
	rebuild upkeep.Limits
	builder build.Settings
	store   store.Settings

	// Generations: a remembered result carries the generation it was computed under, and is ignored
	// when the generation has changed.
	judging  uint64 // incremented when the settings that judgements depend on change
	planning uint64 // incremented when the settings that plans depend on change
}

// newSettings checks the options. The caller fills in the generations.
func newSettings(o *Options) (*settings, error) {
	s := &settings{Options: *o, builder: build.Settings{Failures: o.Failures.OrDefault()},
		store: store.Settings{Space: o.Space}}
	s.Claims = o.Claims.OrDefault()
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

// Reload applies other options: Rules, Policies, Rebuild, AllowOptions, Administrators, Publishers,
// Claims, Remotes, Layers, KeepSource, Failures, Space, Pack, PackAfter, Verify, Drivers and
// Runtimes. Reload ignores the others, which only Open
// applies. Builds are judged again with the new settings, on their next request or in the
// background, whichever is first. On an error nothing is changed.
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

// policyOf returns the strictest of the policies for the execution providers of a request.
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
