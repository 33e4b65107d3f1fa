package cache

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/memo"
)

// probes remembers what the worker found out about runtimes: their devices, and the fingerprints of EPs with
// given devices and options. What is remembered holds for the libraries' digests and the machine's stamp, so it
// outlives the daemon and is forgotten by itself when either changes.
type probes struct {
	compiler compilers.Compiler
	book     memo.Book
	now      func() time.Time
	flights  *flights

	known memo.Table[string, memo.Fact] // by key
}

// failureHolds is how long what went wrong with an EP is answered without trying again: long enough that a library
// which crashes does not do so for each request, and short, for what was missing may have come, and nothing that
// we look at need tell of it.
const failureHolds = 30 * time.Second

// maxProbes bounds what is held in memory, because clients choose options, and bring models. What is for good is in the book as well.
const maxProbes = 1 << 14

func newProbes(compiler compilers.Compiler, book memo.Book, now func() time.Time, flights *flights) *probes {
	return &probes{compiler: compiler, book: book, now: now, flights: flights}
}

// remember runs find once for the key, however many ask, and keeps what it found: for good, or for a while only if
// lasts says no.
func remember[T any](ctx context.Context, p *probes, who asking, ep, key string, fresh bool, lasts func(T) bool, find func(context.Context) (T, error)) (T, error) {
	var out T
	if !fresh {
		if v, ok := recall[T](p, key); ok {
			return v, nil
		}
	}
	fact, err := p.flights.inquire(ctx, key, who, ep, func(ctx context.Context) (any, error) {
		if v, ok := p.load(key).(T); ok && !fresh {
			return v, nil // found between the look above and here
		}
		v, err := find(ctx)
		if err != nil {
			return nil, err
		}
		if p.hold(key, v, lasts(v)); lasts(v) {
			// Not saved costs a probe at the next start, nothing else.
			_ = memo.Save(p.book, "probe:"+key, v)
		}
		return v, nil
	})
	if err != nil {
		return out, err
	}
	return fact.(T), nil // the key says what kind of fact it is
}

// recall gives what is remembered for the key.
func recall[T any](p *probes, key string) (out T, ok bool) {
	if out, ok = p.load(key).(T); ok {
		return out, true
	}
	if out, ok = memo.Recall[T](p.book, "probe:"+key); ok {
		p.hold(key, out, true)
	}
	return out, ok
}

func (p *probes) load(key string) any {
	f, _ := p.known.Load(key)
	return f.Now(p.now())
}

func (p *probes) hold(key string, v any, lasts bool) {
	f := memo.Fact{Value: v}
	if !lasts {
		f.Until = p.now().Add(failureHolds)
	}
	p.known.Save(key, f, maxProbes)
}

// key covers what a probe's result depends on: the machine, ONNX Runtime's version and bytes, and every EP's bytes.
func (p *probes) key(kind string, rc *runtimeContent, more []byte) string {
	b := append([]byte(kind), rc.machine[:]...)
	b = append(append(b, rc.spec.ORTVersion...), rc.ort[:]...)
	for _, ep := range sortedKeys(rc.digests) {
		d := rc.digests[ep]
		b = append(append(append(b, 0), ep...), d[:]...)
	}
	sum := digestOf(append(append(b, 0), more...))
	return fmt.Sprintf("%s-%x", kind, sum[:16])
}

// facts lists the devices of the runtime's EPs.
func (p *probes) facts(ctx context.Context, who asking, rc *runtimeContent, fresh bool) (compilers.Facts, error) {
	// What is wrong with a library may lie in the ONNX Runtime beside it, and the error names both.
	key := p.key("devices", rc, []byte(rc.spec.ORTLibrary))
	return remember(ctx, p, who, strings.Join(sortedKeys(rc.digests), ", "), key, fresh, allWork, func(ctx context.Context) (compilers.Facts, error) {
		return still(rc, func() (compilers.Facts, error) { return p.compiler.Probe(ctx, rc.spec) })
	})
}

// still runs what loads the runtime's libraries, and takes the result only if they are the same afterwards: what two
// versions did together is said of neither.
func still[T any](rc *runtimeContent, run func() (T, error)) (T, error) {
	var none T
	if rc.past.Load() {
		return none, errReplaced
	}
	v, err := run()
	if !rc.stands() {
		return none, errMoving
	}
	return v, err
}

// errReplaced says that nothing can be run with the libraries that the caller has open: others are in their place.
var errReplaced = errors.New("the libraries were replaced, perhaps by an update")

// unsettled tells whether an error says nothing of what was asked about: the caller left, or the libraries changed.
func unsettled(ctx context.Context, err error) bool {
	return err != nil && (ctx.Err() != nil || errors.Is(err, errMoving) || errors.Is(err, errReplaced) || errors.Is(err, errGivenUp))
}

// allWork tells whether every EP loads and lists a device.
func allWork(f compilers.Facts) bool {
	return !slices.ContainsFunc(f.EPs, func(ep compilers.EPProbe) bool { return ep.Error != "" || len(ep.Devices) == 0 })
}

// always: what is found out is known for good.
func always[T any](T) bool { return true }

// proven tells whether a load check's result is for good. A worker that crashed may have lacked memory for a moment.
func proven(r compilers.CheckResult) bool { return r.Outcome != compilers.Failed || r.Code != crashed }

// crashed is the code of a check whose process crashed.
const crashed = -1

// fingerprints compiles a tiny model with each EP, as the request would have it.
func (p *probes) fingerprints(ctx context.Context, who asking, rc *runtimeContent, eps []compilers.EP, fresh bool) ([]compilers.Fingerprint, error) {
	more, err := json.Marshal(fingerprintFacts(eps))
	if err != nil {
		return nil, err
	}
	made, err := remember(ctx, p, who, eps[0].Name, p.key("fingerprint", rc, more), fresh, printed.holds, func(ctx context.Context) (printed, error) {
		return p.print(ctx, rc, eps, nil)
	})
	return made.of(eps, err)
}

// print makes the fingerprints, with own's model where an EP takes none of the tiny ones.
func (p *probes) print(ctx context.Context, rc *runtimeContent, eps []compilers.EP, own *compilers.Job) (printed, error) {
	marks, err := still(rc, func() ([]compilers.Fingerprint, error) { return p.compiler.Fingerprint(ctx, rc.spec, eps, own) })
	if err != nil && ctx.Err() == nil {
		if f := failure.Of(err, ""); f != nil && f.Reason.OfModel() {
			return printed{err: err}, nil
		}
	}
	return printed{Marks: marks}, err
}

// of gives what was printed for the EPs.
func (p printed) of(eps []compilers.EP, err error) ([]compilers.Fingerprint, error) {
	if err == nil {
		err = p.err
	}
	if err == nil && len(p.Marks) != len(eps) {
		err = errors.New("the worker answered for another number of execution providers")
	}
	if err != nil {
		return nil, err
	}
	marks := slices.Clone(p.Marks)
	for i := range marks { // not remembered, because every earlier fingerprint lacks it
		marks[i].MachineClass = compilers.MachineClass(eps[i], marks[i].Devices)
	}
	return marks, nil
}

// marks are the fingerprints that a request's plan needs. Where an EP takes none of the tiny models they are made with the request's own.
func (c *Cache) marks(ctx context.Context, at *attempt, p *plan) error {
	var err error
	if p.marks, err = c.probes.fingerprints(ctx, inquirer(at.Request), at.rc, p.eps, false); err == nil || at.Graph == nil || !errors.Is(err, compilers.ErrNotTaken) {
		return err
	}
	p.onModel = true
	key := c.probes.key("fingerprint", at.rc, p.requestKey[:])
	made, err := onCopy(ctx, c, at.Request, p.canonical, key, printed.holds, func(ctx context.Context, model string) (printed, error) {
		return c.probes.print(ctx, at.rc, p.eps, ownJob(p.canonical, model))
	})
	p.marks, err = made.of(p.eps, err)
	return err
}

// ownJob is a job with a request's own model, for compilers.Fingerprint and compilers.Control.
func ownJob(r identity.Record, model string) *compilers.Job {
	return &compilers.Job{Model: model, SessionOptions: r.SessionOptions, FreeDimensions: r.FreeDimensions,
		FreeDimensionsByDenotation: r.FreeDimensionsByDenotation, GraphOptimizationLevel: r.GraphOptimizationLevel}
}

// printed are fingerprints, or why there are none: an option over which the execution provider crashes must not make it do
// so with each request.
type printed struct {
	Marks []compilers.Fingerprint
	err   error
}

// holds: an EP that compiles one node is known for good.
func (p printed) holds() bool { return p.err == nil }

// fingerprintFacts are the parts of the EPs that a fingerprint depends on: not where a library lies.
func fingerprintFacts(eps []compilers.EP) []compilers.EP {
	out := slices.Clone(eps)
	for i := range out {
		info, _ := compilers.EPByName(out[i].Name)
		out[i].Library, out[i].Options = "", info.ForFingerprint(identity.BaseNames(info, out[i].Options))
	}
	return out
}

// devices finds the devices that a request's EP means: for each selector the first that fits, and without any
// selector the EP's first device.
func resolveDevices(facts compilers.Facts, ep identity.EP) ([]compilers.Device, error) {
	i := slices.IndexFunc(facts.EPs, func(p compilers.EPProbe) bool { return p.Name == ep.Name })
	if i < 0 {
		return nil, apierr.New(apierr.Unavailable, nil, "the runtime has no execution provider %q", ep.Name)
	}
	probe := &facts.EPs[i]
	if probe.Error != "" {
		return nil, apierr.New(apierr.Unavailable, nil, "execution provider %s: %s", ep.Name, probe.Error).
			WithFact("library", probe.Library)
	}
	selectors := ep.Devices
	if len(selectors) == 0 {
		selectors = []compilers.Device{{}}
	}
	out := make([]compilers.Device, 0, len(selectors))
	for _, sel := range selectors {
		if sel.Virtual() {
			// No probe lists what is not there. Whether the execution provider knows such a device the fingerprint tells.
			out = append(out, compilers.Device{Type: strings.ToUpper(sel.Type), VendorID: sel.VendorID, DeviceID: sel.DeviceID, Metadata: sel.Metadata})
			continue
		}
		i := slices.IndexFunc(probe.Devices, func(d compilers.DeviceFacts) bool { return sel.Fits(d) })
		if i < 0 {
			return nil, noDevice(ep.Name, sel, probe.Devices)
		}
		d := probe.Devices[i]
		out = append(out, compilers.Device{Type: d.Type, VendorID: d.VendorID, DeviceID: d.DeviceID, Metadata: sel.Metadata})
	}
	return out, nil
}

// onlyProcessors tells whether the execution providers have nothing in this machine but the processor: then none of them has a device to
// keep for itself.
func onlyProcessors(facts compilers.Facts, eps []compilers.EP) bool {
	for _, ep := range eps {
		i := slices.IndexFunc(facts.EPs, func(p compilers.EPProbe) bool { return p.Name == ep.Name })
		if i < 0 || len(facts.EPs[i].Devices) == 0 || slices.ContainsFunc(ep.Devices, compilers.Device.Virtual) {
			return false
		}
		if slices.ContainsFunc(facts.EPs[i].Devices, func(d compilers.DeviceFacts) bool { return !strings.EqualFold(d.Type, "CPU") }) {
			return false
		}
	}
	return true
}

func noDevice(ep string, sel compilers.Device, have []compilers.DeviceFacts) error {
	if len(have) == 0 {
		return apierr.New(apierr.Unavailable, nil, "execution provider %s lists no device on this machine", ep).
			WithHint("its drivers may be missing, or it may not support this processor; epcachectl probe shows what there is")
	}
	return apierr.New(apierr.Unavailable, nil, "execution provider %s has no %s here; it lists %s", ep, sel, sel.Listed(have)).
		WithHint("epcachectl probe --json tells all about the devices; with is_virtual=1 one is meant that is not in this machine, where the execution provider can compile for it")
}

// inquiry finds out something of a runtime before a request can be thought through: which devices its execution providers
// list, or what they make of one node. The first time that may take long, so users see it among the jobs, and may give it up.
// One that nobody asked for is the daemon's own business, and not shown.
type inquiry struct {
	about jobFacts
	find  func(context.Context) (any, error)
}

func (q *inquiry) facts() jobFacts { return q.about }

func (q *inquiry) run(ctx context.Context, f *flight) (*compiled, error) {
	f.mu.Lock()
	f.state, f.started = JobRunning, f.flights.now()
	f.tellLocked("probing")
	f.mu.Unlock()
	fact, err := q.find(ctx)
	if err != nil {
		return nil, err
	}
	return &compiled{fact: fact}, nil
}

// inquire runs find for the key, once however many ask at that time. It goes on when those who asked have left: what it
// brings serves whoever asks next.
func (fs *flights) inquire(ctx context.Context, key string, who asking, ep string, find func(context.Context) (any, error)) (any, error) {
	who.goOn, who.since = true, fs.now()
	result, _, err := fs.join(ctx, flightKey{alone: key}, who, func() (runner, error) {
		about := jobFacts{inquiry: true}
		about.Job = Job{ModelName: who.name, EP: ep, UID: who.uid, Why: "asked for: what its execution provider does here is found out first"}
		return &inquiry{about, find}, nil
	})
	if err != nil {
		return nil, err
	}
	return result.fact, nil
}

// byItself is how the daemon inquires where no request waits.
func byItself() asking { return asking{idle: true} }

// inquirer is how a request does.
func inquirer(r *Request) asking { return asking{uid: r.Peer.UID, name: r.Name} }

// hidden tells whether the flight is one that no user asked for and none can do anything about. The caller holds f.mu.
func (f *flight) hidden() bool { return f.about.inquiry && len(f.askers) == 0 }

// givenUp is the error of a request that left, or whose inquiry was cancelled; nil if that is not what happened.
func givenUp(ctx context.Context, model string, err error) error {
	if err != nil && (ctx.Err() != nil || errors.Is(err, errGivenUp)) {
		return flightError(ctx, model, err)
	}
	return nil
}
