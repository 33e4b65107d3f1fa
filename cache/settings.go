package cache

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/store"
)

// settings are the options that may change while the cache is open. They are replaced as a whole, and never changed:
// who needs several of them that belong together loads them once.
type settings struct {
	rules            *rules.Set
	policies         map[string]request.Policy
	rebuild          upkeep.Limits
	allowed          identity.Allowed
	administrators   []uint32
	trustedReporters []uint32
	publishers       []uint32
	claims           claims.Limits
	reportQuorum     int
	builder          build.Settings
	store            store.Settings

	// What is remembered is remembered with the generation that it was found out under, and does not count for a later one.
	judging  uint64 // counts changes of what builds are judged by
	planning uint64 // counts changes of what plans depend on
}

// newSettings checks the options. The generations are the caller's to fill in.
func newSettings(o *Options) (*settings, error) {
	s := &settings{rules: o.Rules, policies: o.Policies, allowed: o.AllowOptions, administrators: o.Administrators,
		trustedReporters: o.TrustedReporters, publishers: o.Publishers, claims: o.Claims.OrDefault(), reportQuorum: o.ReportQuorum,
		builder: build.Settings{Failures: o.Failures.OrDefault()}, store: store.Settings{Space: o.Space}}
	if s.rules == nil {
		s.rules = rules.Shipped()
	}
	if s.reportQuorum == 0 {
		s.reportQuorum = 3
	}
	var err error
	if s.builder.KeepSource, err = build.CheckKeepSource(o.KeepSource); err != nil {
		return nil, err
	}
	if s.store.Pack, err = o.packWhen(); err != nil {
		return nil, err
	}
	s.rebuild, err = o.Rebuild.Limits()
	return s, err
}

// Reload puts other options into force: Rules, Policies, Rebuild, AllowOptions, Administrators,
// TrustedReporters, Publishers, Claims, ReportQuorum, KeepSource, Failures, Space, Pack, PackAfter,
// Drivers and Runtimes. The other options are for Open alone and are not looked at. Where builds
// are judged otherwise by now, they are judged anew: at once when they are asked for, and all of
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
	judging := !next.rules.Equal(before.rules) || !reflect.DeepEqual(next.policies, before.policies)
	if judging {
		next.judging++
	}
	if !slices.Equal(next.allowed, before.allowed) {
		next.planning++
	}
	c.settings.Store(next)
	c.rebuilds.Adjust()
	c.store.SetSettings(next.store)
	c.runtimes.Register(o.Runtimes)
	c.runtimes.SetDrivers(o.Drivers)
	if judging {
		c.runtimes.Reassess()
	}
	return nil
}

// later does something that Close waits for.
func (c *Cache) later(do func(context.Context)) {
	c.work.Go(func() { do(c.ctx) })
}

// SetConfigured has status and the doctor tell what is not in force, until it is called again.
func (c *Cache) SetConfigured(now query.Configured) { c.configured.Store(&now) }

// TellConfiguration has the history and the subscribers know that the configuration was changed, or was refused.
func (c *Cache) TellConfiguration(text string) {
	c.happened(Event{Kind: event.Configuration, Text: strings.ToValidUTF8(text[:min(len(text), maxConfigurationText)], "")})
}

// maxConfigurationText bounds what a file with many mistakes says in one event.
const maxConfigurationText = 2000

func (o *Options) packWhen() (store.Packing, error) {
	p := store.Packing{When: o.Pack, After: o.PackAfter}
	switch p.When {
	case "":
		p.When = store.PackCold
	case store.PackCold, store.PackAlways, store.PackOff:
	default:
		return p, fmt.Errorf("pack: %q is none of %q, %q and %q", p.When, store.PackCold, store.PackAlways, store.PackOff)
	}
	if p.After < 0 {
		return p, fmt.Errorf("pack after %s: it cannot be less than nothing", p.After)
	}
	if p.After == 0 {
		p.After = store.DefaultPackAfter
	}
	return p, nil
}

// policyOf is the strictest of the policies for the execution providers of a request.
func (c *Cache) policyOf(eps []compilers.EP) (out request.Policy) {
	policies := c.settings.Load().policies
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
