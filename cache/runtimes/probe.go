package runtimes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/memo"
)

// FailureLifetime is how long an EP's failure is remembered. It is long enough that a crashing
// library does not crash for each request, and short because a missing file may have been added,
// which no check need notice.
const FailureLifetime = 30 * time.Second

// maxFacts bounds the facts in memory, because clients choose options. Permanent facts are also in
// the book.
const maxFacts = 1 << 14

// Inquiry describes a fact to find out about a runtime, once for all callers.
type Inquiry struct {
	Key   string // from Set.Key, with the kind of fact
	EP    string // the execution provider, for messages
	Asker Asker
	Fresh bool // ignore a remembered result
}

// Asker is the request that needs a fact. It is zero if no request waits.
type Asker struct {
	Request bool
	UID     uint32
	Model   string       // its name
	Phase   func(string) // called before a worker is asked; may be nil
}

// Remember returns the remembered fact of the key, or runs find, once for all callers. It remembers
// the result permanently, also over restarts, or for FailureLifetime if lasts reports false. The
// key contains the libraries' digests and the machine.
func Remember[T any](ctx context.Context, s *Set, q Inquiry, lasts func(T) bool,
	find func(context.Context) (T, error)) (T, error) {
	var out T
	if !q.Fresh {
		if v, ok := Recall[T](s, q.Key); ok {
			return v, nil
		}
	}
	if q.Asker.Phase != nil {
		q.Asker.Phase("probing")
	}
	fact, err := s.options.Inquire(ctx, q, func(ctx context.Context) (any, error) {
		if v, ok := s.load(q.Key).(T); ok && !q.Fresh {
			return v, nil // found since the check above
		}
		v, err := find(ctx)
		if err != nil {
			return nil, err
		}
		if lasts(v) {
			// Saved before other callers see it, because a build that is published with this fact
			// needs it after a crash. Best effort: without it the next start probes again.
			_ = memo.Save(durableBook{s.options.Book}, "probe:"+q.Key, v)
		}
		s.save(q.Key, v, lasts(v))
		return v, nil
	})
	if err != nil {
		return out, err
	}
	return fact.(T), nil // the kind in the key implies the type
}

// Book is a memo.Book. SaveNow is durable: a crash does not undo it.
type Book interface {
	memo.Book
	SaveNow(key, value []byte) error
}

// durableBook saves durably. Otherwise, after a crash, a published build would need a worker to
// find the fact again, for which a full disk has no space.
type durableBook struct{ Book }

// Save implements memo.Book.
func (b durableBook) Save(key, value []byte) error { return b.SaveNow(key, value) }

// Recall returns the fact that Remember has stored under the key.
func Recall[T any](s *Set, key string) (out T, ok bool) {
	if out, ok = s.load(key).(T); ok {
		return out, true
	}
	if out, ok = memo.Recall[T](s.options.Book, "probe:"+key); ok {
		s.save(key, out, true)
	}
	return out, ok
}

func (s *Set) load(key string) any {
	f, _ := s.facts.Load(key)
	return f.ValueAt(s.options.Now())
}

func (s *Set) save(key string, v any, lasts bool) {
	f := memo.Fact{Value: v}
	if !lasts {
		f.Until = s.options.Now().Add(FailureLifetime)
	}
	s.facts.Save(key, f, maxFacts)
}

// Key returns a key that covers everything a probe's result depends on: the machine, ONNX Runtime's
// version and bytes, and every EP's bytes.
func (s *Set) Key(kind string, rc *Content, more []byte) string {
	b := append([]byte(kind), rc.Machine[:]...)
	b = append(append(b, rc.Spec.ORTVersion...), rc.ORT[:]...)
	for _, ep := range slices.Sorted(maps.Keys(rc.Digests)) {
		d := rc.Digests[ep]
		b = append(append(append(b, 0), ep...), d[:]...)
	}
	sum := blake3.Sum256(append(append(b, 0), more...))
	return fmt.Sprintf("%s-%x", kind, sum[:16])
}

// Devices lists the devices of the runtime's EPs. With fresh it ignores remembered results.
func (s *Set) Devices(ctx context.Context, who Asker, rc *Content,
	fresh bool) (compilers.Facts, error) {
	// A library may fail because of the ONNX Runtime beside it, and the error names both.
	q := Inquiry{Key: s.Key("devices", rc, []byte(rc.Spec.ORTLibrary)), Asker: who, Fresh: fresh,
		EP: strings.Join(slices.Sorted(maps.Keys(rc.Digests)), ", ")}
	return Remember(ctx, s, q, allUsable, func(ctx context.Context) (compilers.Facts, error) {
		return RunUnreplaced(rc, func() (compilers.Facts, error) {
			return s.options.Compiler.Probe(ctx, rc.Spec)
		})
	})
}

// RunUnreplaced calls run, which loads the runtime's libraries. It fails if they changed in the
// meantime, because a result of two versions together is valid for neither.
func RunUnreplaced[T any](rc *Content, run func() (T, error)) (T, error) {
	var none T
	if rc.removedLibraries.Load() {
		return none, ErrReplaced
	}
	v, err := run()
	if !rc.IsCurrent() {
		return none, ErrFilesChanging
	}
	return v, err
}

// ErrReplaced says that other files have replaced the libraries that the caller has open, so that
// no worker can load them.
var ErrReplaced = errors.New("the libraries were replaced, perhaps by an update")

// ErrGivenUp ends a request, or an inquiry, that its user cancelled.
var ErrGivenUp = errors.New("the job was cancelled")

// IsTransient reports whether an error must not be remembered, because the caller disconnected or
// files changed.
func IsTransient(ctx context.Context, err error) bool {
	return err != nil && (ctx.Err() != nil || errors.Is(err, ErrFilesChanging) ||
		errors.Is(err, ErrReplaced) ||
		errors.Is(err, ErrGivenUp))
}

func allUsable(f compilers.Facts) bool {
	return !slices.ContainsFunc(f.EPs, func(ep compilers.EPProbe) bool {
		return ep.Error != "" || len(ep.Devices) == 0
	})
}

// Fingerprints returns the fingerprints of the EPs with their options, from memory or by compiling
// a tiny model with each.
func (s *Set) Fingerprints(ctx context.Context, who Asker, rc *Content, eps []compilers.EP,
	fresh bool) ([]compilers.Fingerprint, error) {
	more, err := json.Marshal(fingerprintFacts(eps))
	if err != nil {
		return nil, err
	}
	q := Inquiry{Key: s.Key("fingerprint", rc, more), EP: eps[0].Name, Asker: who, Fresh: fresh}
	made, err := Remember(ctx, s, q, FingerprintResult.IsFinal,
		func(ctx context.Context) (FingerprintResult, error) {
			return s.MakeFingerprints(ctx, rc, eps, nil)
		})
	return made.For(eps, err)
}

// MakeFingerprints makes the fingerprints. It uses own's model if an EP takes no tiny one.
func (s *Set) MakeFingerprints(ctx context.Context, rc *Content, eps []compilers.EP,
	own *compilers.Job) (FingerprintResult, error) {
	marks, err := RunUnreplaced(rc, func() ([]compilers.Fingerprint, error) {
		return s.options.Compiler.Fingerprint(ctx, rc.Spec, eps, own)
	})
	if errors.Is(err, compilers.ErrNoContexts) && ctx.Err() == nil {
		return FingerprintResult{NoContexts: true}, nil
	}
	if err != nil && ctx.Err() == nil {
		if f := failure.Of(err, ""); f != nil && f.Reason.BlamesModel() {
			return FingerprintResult{err: err}, nil
		}
	}
	return FingerprintResult{Marks: marks}, err
}

// FingerprintResult has fingerprints, or the error that is remembered instead, so that an option
// which crashes the execution provider does not crash it for each request.
type FingerprintResult struct {
	Marks      []compilers.Fingerprint
	NoContexts bool `json:",omitempty"` // one makes no compiled models: remembered permanently
	err        error
}

// IsFinal reports whether the result is remembered permanently.
func (p FingerprintResult) IsFinal() bool { return p.err == nil }

// For returns the fingerprints of the EPs. err is the error of making them.
func (p FingerprintResult) For(eps []compilers.EP, err error) ([]compilers.Fingerprint, error) {
	err = cmp.Or(err, p.err)
	if err == nil && p.NoContexts {
		err = compilers.ErrNoContexts
	}
	if err == nil && len(p.Marks) != len(eps) {
		err = errors.New("the worker answered for another number of execution providers")
	}
	if err != nil {
		return nil, err
	}
	marks := slices.Clone(p.Marks)
	// set here and not remembered, because older remembered fingerprints lack it
	for i := range marks {
		marks[i].MachineClass = compilers.MachineClass(eps[i], marks[i].Devices)
	}
	return marks, nil
}

func fingerprintFacts(eps []compilers.EP) []compilers.EP {
	out := slices.Clone(eps)
	for i := range out {
		info, _ := compilers.EPByName(out[i].Name)
		out[i].Library, out[i].Options = "",
			info.ForFingerprint(identity.LibraryBaseNames(info, out[i].Options))
	}
	return out
}

// ResolveDevices finds for each selector the first device that fits, or the EP's first device.
func ResolveDevices(facts compilers.Facts, ep identity.EP) ([]compilers.Device, error) {
	i := slices.IndexFunc(facts.EPs, func(p compilers.EPProbe) bool { return p.Name == ep.Name })
	if i < 0 {
		return nil, apierr.New(apierr.Unavailable, nil,
			"the runtime has no execution provider %q", ep.Name)
	}
	probe := &facts.EPs[i]
	if probe.Error != "" {
		return nil, apierr.New(apierr.Unavailable, nil, "execution provider %s: %s", ep.Name,
			probe.Error).
			WithFact("library", probe.Library)
	}
	selectors := ep.Devices
	if len(selectors) == 0 {
		selectors = []compilers.Device{{}}
	}
	out := make([]compilers.Device, 0, len(selectors))
	for _, sel := range selectors {
		if sel.Virtual() {
			// No probe lists a virtual device. The fingerprint shows whether the EP knows it.
			out = append(out, compilers.Device{Type: strings.ToUpper(sel.Type),
				VendorID: sel.VendorID, DeviceID: sel.DeviceID, Metadata: sel.Metadata})
			continue
		}
		i := slices.IndexFunc(probe.Devices, func(d compilers.DeviceFacts) bool {
			return sel.Fits(d)
		})
		if i < 0 {
			return nil, noDevice(ep.Name, sel, probe.Devices)
		}
		d := probe.Devices[i]
		out = append(out, compilers.Device{Type: d.Type, VendorID: d.VendorID, DeviceID: d.DeviceID,
			Metadata: sel.Metadata})
	}
	return out, nil
}

// OnlyProcessors reports whether the execution providers can use only the processor in this
// machine, so that no device is busy while one process uses it.
func OnlyProcessors(facts compilers.Facts, eps []compilers.EP) bool {
	for _, ep := range eps {
		i := slices.IndexFunc(facts.EPs, func(p compilers.EPProbe) bool {
			return p.Name == ep.Name
		})
		if i < 0 || len(facts.EPs[i].Devices) == 0 ||
			slices.ContainsFunc(ep.Devices, compilers.Device.Virtual) {
			return false
		}
		if slices.ContainsFunc(facts.EPs[i].Devices, func(d compilers.DeviceFacts) bool {
			return !strings.EqualFold(d.Type, "CPU")
		}) {
			return false
		}
	}
	return true
}

func noDevice(ep string, sel compilers.Device, have []compilers.DeviceFacts) error {
	if len(have) == 0 {
		why, help := WhyNoDevice(ep)
		return apierr.New(apierr.Unavailable, nil,
			"execution provider %s lists no device on this machine: %s", ep, why).
			WithHint("%s", help)
	}
	return apierr.New(apierr.Unavailable, nil, "execution provider %s has no %s here; it has "+
		"%s", ep, sel, sel.Listed(have)).
		WithHint("epcachectl probe --json lists all devices; is_virtual=1 names a device that " +
			"is not in this machine but can be compiled for")
}

// ResolveEPs returns the execution providers as the worker gets them.
func ResolveEPs(eps []identity.EP, canon []identity.RecordEP, rc *Content) ([]compilers.EP, error) {
	out := make([]compilers.EP, len(eps))
	for i, ep := range eps {
		lib, ok := rc.Library(ep.Name)
		if !ok {
			return nil, apierr.New(apierr.Unavailable, nil,
				"the runtime has no execution provider %q", ep.Name)
		}
		options, err := identity.FillOptions(ep.Name, ep.Options, lib)
		if err != nil {
			return nil, err
		}
		out[i] = compilers.EP{Name: ep.Name, Library: lib.Path, Options: options}
		for _, d := range canon[i].Devices {
			out[i].Devices = append(out[i].Devices, compilers.Device(d))
		}
	}
	return out, nil
}

// SingleEP returns one execution provider with its first device and default options.
func SingleEP(rc *Content, facts compilers.Facts, name string) ([]compilers.EP, error) {
	ep := identity.EP{Name: name}
	devices, err := ResolveDevices(facts, ep)
	if err != nil {
		return nil, err
	}
	return ResolveEPs([]identity.EP{ep},
		[]identity.RecordEP{{Name: name, Devices: identity.Devices(devices)}}, rc)
}

// Facts describes one runtime, for reports.
type Facts struct {
	Name       string
	Registered bool
	Spec       compilers.Runtime
	Digests    map[string]string // by EP
	Facts      compilers.Facts
	Marks      map[string]compilers.Fingerprint // by EP, with default options
	MarkErrors map[string]error                 // by EP: why there is none
	Drivers    map[string]Driver                // by EP
	Err        error
	At         time.Time

	State    string    // "ready", "changing", "unusable"
	Watched  string    // "inotify", or "polled: <why>"
	Changes  []string  // changes found by the last assessment, one line each
	Assessed time.Time // time of the last assessment; zero: none
	Previous time.Time // time of the assessment before that; zero: none

	// Unsettled: the files changed, or the probe was cancelled, so the errors are not the
	// runtime's.
	Unsettled bool
}

// ErrorText returns an error's text, and "" for none.
func ErrorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// Driver is the version of an execution provider's driver, and its source.
type Driver struct {
	Version, Source string
}

// Probe returns the facts about a runtime and its EPs. It loads the libraries, and compiles a tiny
// model with each, unless the results are remembered.
func (s *Set) Probe(ctx context.Context, rt *Runtime) Facts { return s.probe(ctx, rt, false) }

func (s *Set) probe(ctx context.Context, rt *Runtime, fresh bool) Facts {
	out := Facts{Name: rt.Name, Registered: rt.Registered, At: s.options.Now(),
		Drivers: make(map[string]Driver), Digests: make(map[string]string),
		Marks: make(map[string]compilers.Fingerprint), MarkErrors: make(map[string]error)}
	rc, err := contentWith(ctx, s, rt, nil, func(string) {})
	out.State, out.Watched = rt.State(), s.Watched(rt)
	if last, ok := s.lastProbe(rt); ok {
		out.Changes, out.Assessed, out.Previous = last.Changes, last.At, last.Previous
	}
	if err != nil {
		out.Err, out.Unsettled = err, IsTransient(ctx, err)
		return out
	}
	out.Spec = rc.Spec
	for ep, d := range rc.Digests {
		out.Digests[ep] = d.String()
	}
	if out.Facts, err = s.Devices(ctx, Asker{}, rc, fresh); err != nil {
		out.Err, out.Unsettled = err, IsTransient(ctx, err)
		return out
	}
	for _, ep := range out.Facts.EPs {
		if ep.Error != "" {
			continue
		}
		mark, err := s.defaultFingerprint(ctx, rc, out.Facts, ep.Name, fresh)
		if err != nil {
			out.MarkErrors[ep.Name] = err
			out.Unsettled = out.Unsettled || IsTransient(ctx, err)
			continue
		}
		out.Marks[ep.Name] = mark
		if v, source := s.machine.Driver(ep.Name, mark); v != "" {
			out.Drivers[ep.Name] = Driver{v, source}
		}
	}
	return out
}

func (s *Set) defaultFingerprint(ctx context.Context, rc *Content, facts compilers.Facts,
	name string,
	fresh bool) (compilers.Fingerprint, error) {
	eps, err := SingleEP(rc, facts, name)
	if err != nil {
		return compilers.Fingerprint{}, err
	}
	marks, err := s.Fingerprints(ctx, Asker{}, rc, eps, fresh)
	if err != nil {
		return compilers.Fingerprint{}, err
	}
	return marks[0], nil
}

// Refresh probes a runtime again, ignoring remembered results. If it finds another SDK, driver or
// device although neither the files nor the machine changed, earlier plans, verdicts and load
// checks no longer count for the runtime.
func (s *Set) Refresh(ctx context.Context, rt *Runtime) Facts {
	before := s.probe(ctx, rt, false)
	after := s.probe(ctx, rt, true)
	seen := MachineID(after.fingerprint(&before))
	if ctx.Err() != nil || after.Unsettled || before.Unsettled ||
		seen == before.fingerprint(&after) {
		return after
	}
	// Best effort: without it, earlier results count again if the daemon restarts before the next
	// refresh.
	_ = s.options.Book.Save(noticedKey(rt), seen[:])
	rt.noticed.Store(&seen)
	return s.probe(ctx, rt, false) // with the new machineID
}

func noticedKey(rt *Runtime) []byte { return []byte("noticed:" + rt.subject) }

// recallNoticed loads the result of an earlier Refresh for a runtime that is new to this process.
func (s *Set) recallNoticed(rt *Runtime) {
	raw, ok := s.options.Book.Get(noticedKey(rt))
	if ok && len(raw) == len(MachineID{}) && rt.noticed.Load() == nil {
		seen := MachineID(raw)
		rt.noticed.Store(&seen)
	}
}

func (f *Facts) fingerprint(other *Facts) [32]byte {
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
		return [32]byte{} // cannot happen: strings and numbers can always be marshalled
	}
	return blake3.Sum256(raw)
}
