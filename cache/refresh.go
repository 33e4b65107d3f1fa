package cache

import (
	"context"
	"encoding/json"
	"slices"

	"github.com/epcached/epcached/compilers"
)

// refresh probes a runtime again, whatever is remembered. Where it finds another SDK, driver or
// device although neither the files nor the machine changed, the runtime counts as another one: no
// plan, verdict or load check of before is used for it.
func (c *Cache) refresh(ctx context.Context, rt *runtime) RuntimeFacts {
	before := c.probeRuntime(ctx, rt, false)
	after := c.probeRuntime(ctx, rt, true)
	seen := machine(after.likeness(&before))
	if ctx.Err() != nil || after.unsettled || before.unsettled || seen == before.likeness(&after) {
		return after
	}
	// Not saved costs what it prevents only if the daemon starts again before the next refresh.
	_ = c.probes.book.SaveMemo(noticedKey(rt), seen[:])
	rt.noticed.Store(&seen)
	return c.probeRuntime(ctx, rt, false) // as what it is from now on
}

func noticedKey(rt *runtime) []byte { return []byte("noticed:" + rt.subject) }

// recallNoticed is for a runtime that this process has not looked at yet.
func (c *Cache) recallNoticed(rt *runtime) {
	raw, ok := c.probes.book.Memo(noticedKey(rt))
	if ok && len(raw) == len(machine{}) && rt.noticed.Load() == nil {
		seen := machine(raw)
		rt.noticed.Store(&seen)
	}
}

// likeness digests what a probe found of those execution providers that worked both times.
func (f *RuntimeFacts) likeness(other *RuntimeFacts) [32]byte {
	type likeness struct {
		Devices []compilers.DeviceFacts
		Mark    compilers.Fingerprint
	}
	all := make(map[string]likeness)
	for _, ep := range f.Facts.EPs {
		one := likeness{Devices: ep.Devices}
		if _, both := other.Marks[ep.Name]; both {
			one.Mark = f.Marks[ep.Name]
			one.Mark.Seconds = 0
		}
		works := func(p compilers.EPProbe) bool { return p.Name == ep.Name && p.Error == "" }
		if works(ep) && slices.ContainsFunc(other.Facts.EPs, works) {
			all[ep.Name] = one
		}
	}
	raw, err := json.Marshal(all)
	if err != nil {
		return [32]byte{} // texts and numbers can always be marshalled
	}
	return digestOf(raw)
}
