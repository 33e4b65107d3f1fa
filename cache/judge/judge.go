// Package judge says how a build suits a runtime: whether it is optimal, works, or does not load
// there, and how that is known.
//
// The sources, from best to worst, are an equal library, the execution provider's own verdict, an
// equal fingerprint, a load check, and the rules of package rules. Nothing here loads a build: the
// caller does where that could change a judgement (see Check). Verdicts are remembered for exactly
// the libraries that they were given for, under the rules in force.
//
// Start reading at Judge.
package judge

import (
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"time"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/unixsock/wire"
)

// Judgement says how a build suits a runtime, and how that is known.
type Judgement struct {
	Verdict compilers.Verdict
	Source  string // one of those below; "": no source could tell
	Reason  string
	At      time.Time
	Runtime string // the runtime's name

	Level string `json:"-"` // the only graph optimisation level at which it loads, "" if any
	// Firm: said by the execution provider, or of its own library. Nothing that we try could know better.
	Firm bool `json:"-"`
}

// The sources of judgements, from best to worst; a rule's name follows its word.
const (
	SourceLibrary     = "same library"
	SourceEP          = "execution provider"
	SourceFingerprint = "fingerprint"
	SourceLoadCheck   = "load check"
	SourcePut         = "put" // the caller compiled it itself
	SourceRule        = "rule "
)

// Badness orders verdicts: 0 is the best. Not to know is worse than to prefer recompilation, and
// better than a refusal.
func Badness(v compilers.Verdict) int {
	switch v {
	case compilers.Optimal:
		return 0
	case compilers.PreferRecompilation:
		return 1
	case compilers.Unsupported:
		return 3
	}
	return 2
}

// Options say what a Judge works with. All must be set.
type Options struct {
	Runtimes *runtimes.Set
	Compiler compilers.Compiler
	Index    *index.Index
	Now      func() time.Time
	Log      *slog.Logger
	Event    func(index.Event)

	// Rules returns those in force, and their generation: what was judged under another one does not count.
	Rules func() (*rules.Set, uint64)
	// Verdicts returns what is remembered for a runtime's contents.
	Verdicts func(*runtimes.Content) *Verdicts
	// Target returns what a build of a request like the build's would be compiled for.
	Target func(context.Context, *runtimes.Runtime, *runtimes.Content, *index.Build) (*Target, error)
	// Rebuild has a build compiled again in the background, for the runtime of that name.
	Rebuild func(b *index.Build, runtime, why string)
}

// Judge judges builds, and remembers the verdicts. Make one with New. Its methods may be called by
// several goroutines.
type Judge struct{ Options }

// New returns a Judge.
func New(o Options) *Judge { return &Judge{o} }

func (x *Judge) generation() uint64 {
	_, generation := x.Rules()
	return generation
}

// Check loads a build where that could change the judgement. tried is false where it could not.
type Check func(ctx context.Context, glance Judgement) (checked compilers.CheckResult, tried bool, err error)

// Build says how a build suits the target, from the best source that can tell: its execution
// provider's own library, the provider's verdict, the fingerprint, a load check, the rules. It is
// worked out once for each build and runtime.
func (x *Judge) Build(ctx context.Context, t *Target, b *index.Build, check Check) (Judgement, error) {
	under := x.generation() // before anything that depends on it is read
	verdicts := x.Verdicts(t.Content)
	if j, ok := verdicts.load(b.ID, under); ok {
		return j, nil
	}
	if j, ok := x.disproved(t, b); ok {
		verdicts.save(b.ID, j, under)
		return j, nil
	}
	j, err := x.Glance(ctx, t, b)
	if err != nil {
		return j, err
	}
	if b.Put {
		j.Firm = false // what it says of itself is what its maker wrote: it is loaded before it is believed
	}
	checked, tried, err := check(ctx, j)
	if err != nil {
		return j, err
	}
	if tried {
		j = x.tried(t, b, j, checked)
	}
	verdicts.save(b.ID, j, under)
	return j, nil
}

// Knows reports whether Build need not work anything out.
func (x *Judge) Knows(t *Target, b *index.Build) bool {
	_, known := x.Verdicts(t.Content).load(b.ID, x.generation())
	return known
}

// Disprove remembers that a build of another library does not load with the runtime, whatever
// judgements said. It returns the judgement.
func (x *Judge) Disprove(t *Target, b *index.Build, text string) Judgement {
	j := Judgement{Verdict: compilers.Unsupported, Source: SourceLoadCheck, Reason: text,
		At: x.Now(), Runtime: t.Runtime, Firm: true}
	x.Verdicts(t.Content).save(b.ID, j, x.generation())
	if err := memo.Save(&x.Index.Memos, x.disprovedKey(t, b), j); err != nil {
		// It is reported again after a restart.
		x.Log.Warn("judgement not kept", "build", b.BuildKey.String(), "error", err)
	}
	return j
}

func (x *Judge) disproved(t *Target, b *index.Build) (j Judgement, ok bool) {
	j, ok = memo.Recall[Judgement](&x.Index.Memos, x.disprovedKey(t, b))
	j.Firm = ok
	return j, ok
}

func (x *Judge) disprovedKey(t *Target, b *index.Build) string {
	return "disproved:" + x.Runtimes.Key("report", t.Content, b.ID[:])
}

// Target is what a build is judged for: a runtime, with the execution providers and options of a request.
type Target struct {
	Runtime  string // its name
	Content  *runtimes.Content
	EPs      []compilers.EP
	Marks    Marks
	Facts    []index.EPFacts // of a build that would be compiled for it, by the EPs' order
	BuildKey index.BuildKey  // of such a build
	Seen     [32]byte        // Marks.Digest
}

// Key is for what is remembered of a judgement. It covers all that a probe can notice, such as
// another SDK or driver.
func (x *Judge) Key(t *Target, kind string, more []byte) string {
	return x.Runtimes.Key(kind, t.Content, append(t.Seen[:], more...))
}

// Marks are the fingerprints of a request's execution providers, in their order.
type Marks []compilers.Fingerprint

// Digest covers what a probe can notice of the execution providers: SDK, devices with their
// metadata, drivers.
func (f Marks) Digest(facts []index.EPFacts) [32]byte {
	all := slices.Clone(f)
	for i := range all {
		all[i].Seconds, all[i].DriverVersion = 0, facts[i].DriverVersion
	}
	raw, err := json.Marshal(all)
	if err != nil {
		return [32]byte{} // texts and numbers can always be marshalled
	}
	return blake3.Sum256(raw)
}

// Elsewhere reports whether one of the execution providers may have made its part of the build on a
// machine of another class, and does not state the hardware: then the build may load here and fail
// when it is run.
func (f Marks) Elsewhere(b *index.Build) bool {
	for i := range b.EPs {
		if f.elsewhere(i, &b.EPs[i]) {
			return true
		}
	}
	return false
}

func (f Marks) elsewhere(i int, made *index.EPFacts) bool {
	class, hardware := f[i].MachineClass, made.HardwareArchitecture
	if made.TookNone || class == "" || hardware == class {
		return false
	}
	return hardware == "" || compilers.IsMachineClass(hardware) || f[i].HardwareArchitecture == ""
}

// Fill says in the message that clients receive how the build suits the runtime.
func (j Judgement) Fill(out *wire.Build) {
	if j.Source != "" || j.Reason != "" { // else it was not judged
		out.Compatibility, out.CompatibilitySource = j.Verdict.String(), j.Source
		out.CompatibilityReason = wire.Valid(j.Reason)
		out.CompatibilityRuntime, out.JudgedMs = j.Runtime, wire.Milliseconds(j.At)
	}
}
