package runtimes

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/compilers"
)

// Facts is what is known of one runtime.
type Facts struct {
	Name       string
	Registered bool
	Spec       compilers.Runtime
	Digests    map[string]string // by EP
	Facts      compilers.Facts
	Marks      map[string]compilers.Fingerprint // by EP, with default options
	MarkErrors map[string]string                // by EP: why there is none
	Drivers    map[string]Driver                // by EP
	Error      string
	At         time.Time

	State    string    // "ready", "changing", "unusable"
	Watched  string    // "inotify", or "polled: <why>"
	Changes  []string  // what was different when it was last assessed, a line each
	Assessed time.Time // when that was; zero: never
	Previous time.Time // when it was assessed before that; zero: never

	Unsettled bool // the files changed meanwhile, or it was cancelled: an error among these says nothing of the runtime
}

// Driver is the version of an execution provider's driver, and where it is from.
type Driver struct {
	Version, Source string
}

// Probe looks at a runtime and returns what its EPs are and list. Libraries are loaded, and a tiny model
// is compiled with each, as far as nothing is remembered of them.
func (s *Set) Probe(ctx context.Context, rt *Runtime) Facts { return s.probe(ctx, rt, false) }

func (s *Set) probe(ctx context.Context, rt *Runtime, fresh bool) Facts {
	out := Facts{Name: rt.Name, Registered: rt.Registered, At: s.options.Now(), Drivers: make(map[string]Driver),
		Digests: make(map[string]string), Marks: make(map[string]compilers.Fingerprint), MarkErrors: make(map[string]string)}
	rc, err := s.Content(ctx, rt, func(string) {})
	out.State, out.Watched = rt.State(), s.Watched(rt)
	if last, ok := s.lastProbe(rt); ok {
		out.Changes, out.Assessed, out.Previous = last.Changes, last.At, last.Previous
	}
	if err != nil {
		out.Error, out.Unsettled = err.Error(), Unsettled(ctx, err)
		return out
	}
	out.Spec = rc.Spec
	for ep, d := range rc.Digests {
		out.Digests[ep] = d.String()
	}
	if out.Facts, err = s.Devices(ctx, Asker{}, rc, fresh); err != nil {
		out.Error, out.Unsettled = err.Error(), Unsettled(ctx, err)
		return out
	}
	for _, ep := range out.Facts.EPs {
		if ep.Error != "" {
			continue
		}
		mark, err := s.defaultFingerprint(ctx, rc, out.Facts, ep.Name, fresh)
		if err != nil {
			out.MarkErrors[ep.Name] = err.Error()
			out.Unsettled = out.Unsettled || Unsettled(ctx, err)
			continue
		}
		out.Marks[ep.Name] = mark
		if v, source := s.machine.Driver(ep.Name, mark); v != "" {
			out.Drivers[ep.Name] = Driver{v, source}
		}
	}
	return out
}

// defaultFingerprint is what a build made with the EP's first device and default options would say of itself.
func (s *Set) defaultFingerprint(ctx context.Context, rc *Content, facts compilers.Facts, name string,
	fresh bool) (compilers.Fingerprint, error) {
	eps, err := Alone(rc, facts, name)
	if err != nil {
		return compilers.Fingerprint{}, err
	}
	marks, err := s.Fingerprints(ctx, Asker{}, rc, eps, fresh)
	if err != nil {
		return compilers.Fingerprint{}, err
	}
	if len(marks) == 0 {
		return compilers.Fingerprint{}, errors.New("the worker gave no fingerprint")
	}
	return marks[0], nil
}

// Refresh probes a runtime again, whatever is remembered. Where it finds another SDK, driver or
// device although neither the files nor the machine changed, the runtime counts as another one: no
// plan, verdict or load check of before is used for it.
func (s *Set) Refresh(ctx context.Context, rt *Runtime) Facts {
	before := s.probe(ctx, rt, false)
	after := s.probe(ctx, rt, true)
	seen := MachineID(after.likeness(&before))
	if ctx.Err() != nil || after.Unsettled || before.Unsettled || seen == before.likeness(&after) {
		return after
	}
	// Not saved costs what it prevents only if the daemon starts again before the next refresh.
	_ = s.options.Book.Save(noticedKey(rt), seen[:])
	rt.noticed.Store(&seen)
	return s.probe(ctx, rt, false) // as what it is from now on
}

func noticedKey(rt *Runtime) []byte { return []byte("noticed:" + rt.subject) }

// recallNoticed is for a runtime that this process has not looked at yet.
func (s *Set) recallNoticed(rt *Runtime) {
	raw, ok := s.options.Book.Get(noticedKey(rt))
	if ok && len(raw) == len(MachineID{}) && rt.noticed.Load() == nil {
		seen := MachineID(raw)
		rt.noticed.Store(&seen)
	}
}

// likeness digests what a probe found of those execution providers that worked both times.
func (f *Facts) likeness(other *Facts) [32]byte {
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
	return blake3.Sum256(raw)
}
