package request

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/store"
)

// WithDimensions adds the sizes of free dimensions for running the source model; in the compiled
// model they are fixed.
func (p *Plan) WithDimensions(check compilers.CheckJob) compilers.CheckJob {
	check.FreeDimensions, check.FreeDimensionsByDenotation = p.Canonical.FreeDimensions,
		p.Canonical.FreeDimensionsByDenotation
	return check
}

// PutDescription says in words how an application's build came into the store.
func PutDescription(b *index.Build) string {
	if IsAdopted(b) {
		return PutBy(b)
	}
	return fmt.Sprintf("%s, with %s, in %s", PutBy(b), Makers(b),
		bytesize.Seconds(b.CompileSeconds))
}

// PutBy returns in words the maker of a build that the daemon did not make.
func PutBy(b *index.Build) string {
	if from := b.Imported; from.Key != "" {
		by := fmt.Sprintf("imported by uid %d", b.UID)
		if from.Remote != "" {
			by = "fetched from remote " + from.Remote
		}
		by += fmt.Sprintf(", signed by %.16s", from.Key)
		if from.Builder != "" {
			by += " for builder " + strconv.Quote(from.Builder)
		}
		return by
	}
	if IsAdopted(b) {
		return fmt.Sprintf("adopted: a compiled model of uid %d", b.UID)
	}
	return fmt.Sprintf("compiled by uid %d with its own libraries", b.UID)
}

// Makers lists the libraries that made a build, for messages.
func Makers(b *index.Build) string {
	names := make([]string, len(b.EPs))
	for i, ep := range b.EPs {
		names[i] = strings.TrimSpace(ep.Name + " " + ep.Version)
		if ep.SDKVersion != "" {
			names[i] += " (SDK " + ep.SDKVersion + ")"
		}
	}
	return strings.Join(names, ", ")
}

// EPNames lists the names of the execution providers.
func EPNames(eps []identity.EP) string {
	names := make([]string, len(eps))
	for i, ep := range eps {
		names[i] = ep.Name
	}
	return strings.Join(names, ", ")
}

// Plan has the keys of a request for one runtime, and how it would be compiled.
type Plan struct {
	Canonical   identity.Record
	Record      []byte
	RecordJSON  string
	RequestKey  index.RequestKey
	EPs         []compilers.EP // with library, devices and options as the EP gets them
	Marks       judge.Marks
	MarksDigest [32]byte // digest of the marks and drivers
	Facts       []index.EPFacts
	BuildKey    index.BuildKey
	// OnOwnModel: an EP takes none of the tiny models, so its mark was made with the request's own.
	OnOwnModel bool
	// OnlyProcessors: no execution provider uses a device that only one process can use.
	OnlyProcessors bool
	Outside        bool                 // the daemon does not run the libraries
	Libraries      map[string]cas.Stamp // if Outside: stamps of the hashed libraries, by EP
	Fitting        []*index.Build       // in a read-only store, where no key is known: the builds
}

// MadeExactly reports whether the plan would make an equal build, so that it need not be judged. An
// equal key does not suffice: the build must be judged if it was made with another driver or a
// later ONNX Runtime, which are not part of the key, or if it was put from another machine. For
// libraries that the daemon does not run, the key covers all that.
func (p *Plan) MadeExactly(b *index.Build) bool {
	here := p.Outside || store.SameDrivers(b.EPs, p.Facts) && !p.Marks.LaterIR(b) &&
		!(b.Put && p.Marks.OtherMachine(b))
	return b.BuildKey == p.BuildKey && here
}

// OwnJudgement returns the judgement of a build that MadeExactly accepts.
func (p *Plan) OwnJudgement(b *index.Build, runtime string) judge.Judgement {
	reason, source := "compiled by these or equal libraries, for this hardware", judge.SourceLibrary
	if b.Put {
		reason, source = PutBy(b)+", which are equal to these, for this hardware", judge.SourcePut
		if b.Imported.Key != "" {
			reason = PutBy(b) + ", made by libraries equal to these, for this hardware"
		}
	}
	if from := Origin(b); from != "" {
		reason += "; " + from
	}
	j := judge.Judgement{Verdict: compilers.Optimal, Source: source, Reason: reason,
		At: b.Created, Runtime: runtime}
	return j.Doubted(b)
}

// JudgeTarget is the target that a build is judged for: a runtime and a request's execution
// providers.
type JudgeTarget struct {
	*Plan
	Runtime string
	Content *runtimes.Content

	Model    *Request // a request with its models, for controls; may be nil
	Adopting bool     // Model is an artefact
}

// JudgeTarget returns the target that the plan's builds are judged for.
func (p *Plan) JudgeTarget(rt string, rc *runtimes.Content) *JudgeTarget {
	return &JudgeTarget{Plan: p, Runtime: rt, Content: rc}
}

// Target converts the target for package judge.
func (a *JudgeTarget) Target() *judge.Target {
	return &judge.Target{Runtime: a.Runtime, Content: a.Content, EPs: a.EPs, Marks: a.Marks,
		Facts: a.Facts, BuildKey: a.BuildKey, Noticed: a.MarksDigest}
}

// CheckJob returns a job that loads a graph as the requesting application would.
func (a *JudgeTarget) CheckJob(graph, level string) compilers.CheckJob {
	return compilers.CheckJob{Runtime: a.Content.Spec, EPs: a.EPs, Graph: graph,
		Session: compilers.Session{SessionOptions: a.Canonical.SessionOptions,
			GraphOptimizationLevel: level}}
}

// Encoded returns the encoded request without its model.
func (a *JudgeTarget) Encoded() []byte {
	r := a.Canonical
	r.Model = cas.Digest{}
	return r.Encode()
}

// LoadLevel returns the optimisation level at which applications load the graph unless they set
// another: a session's default, or none if the graph was compiled without optimisation.
func LoadLevel(compiledAt string) string {
	if compiledAt == "disable_all" {
		return compiledAt
	}
	return "all"
}

// StatedFacts returns the plan's facts, updated with those that the execution providers state in
// the graphs. If they state no hardware, it is the class of this machine.
func (p *Plan) StatedFacts(models []*epmodel.Model) []index.EPFacts {
	facts := slices.Clone(p.Facts)
	for i := range facts {
		// If parts contradict each other, the first one counts.
		says, took, _ := compilers.ReadStated(facts[i].Name, p.WritesCompatibility(i), models...)
		SetStatedFacts(&facts[i], says, took)
		if took && !p.Outside {
			facts[i].HardwareArchitecture = cmp.Or(says.HardwareArchitecture,
				p.Marks[i].MachineClass)
		}
	}
	return facts
}

// WritesCompatibility reports whether an EP is known to write compatibility strings.
func (p *Plan) WritesCompatibility(i int) bool {
	return p.Outside || p.Marks[i].CompatibilityString != ""
}

// SetStatedFacts replaces the facts from a one-node compile by those that the graphs state.
func SetStatedFacts(f *index.EPFacts, says compilers.StatedFacts, took bool) {
	f.SDKVersion, f.HardwareArchitecture = says.SDKVersion, says.HardwareArchitecture
	f.CompatibilityString = says.CompatibilityString
	f.TookNone = !took
}

// UncompiledWarnings returns warnings about nodes that the execution providers did not compile.
func (p *Plan) UncompiledWarnings(m *epmodel.Model, open []OpenDimension) (warnings []string) {
	made := make(map[string]bool)
	for _, n := range m.Contexts {
		made[n.Source] = true
	}
	for _, ep := range p.EPs {
		if !made[ep.Name] {
			warnings = append(warnings, fmt.Sprintf("%s took no node of this model", ep.Name))
		}
	}
	if m.Nodes > len(m.Contexts) {
		warnings = append(warnings, "nodes that another execution provider runs: "+
			""+m.UncompiledSummary(8))
		if len(open) > 0 {
			warnings = append(warnings, DimensionsHint(open))
		}
	}
	return warnings
}

// FailureKey returns the key of the plan's remembered failures.
func (p *Plan) FailureKey(rc *runtimes.Content, scope string) failure.Key {
	b := append(append([]byte(nil), rc.Machine[:]...), rc.ORT[:]...)
	for i := range p.Facts {
		b = append(append(b, 0), p.Facts[i].DriverVersion...)
	}
	sum := DigestOf(b)
	return failure.Key{Build: p.BuildKey, Scope: scope, With: [16]byte(sum[:16])}
}

// ExpectedFacts returns the facts of a build that would be made now, to compare them with b's. If b
// has the plan's key, these are b's own, because graphs may state more than a one-node compile
// does.
func (p *Plan) ExpectedFacts(b *index.Build) []index.EPFacts {
	if b.BuildKey != p.BuildKey || len(b.EPs) != len(p.Facts) {
		return p.Facts
	}
	facts := slices.Clone(p.Facts)
	for i := range facts {
		f, made := &facts[i], &b.EPs[i]
		f.SDKVersion, f.HardwareArchitecture = made.SDKVersion, made.HardwareArchitecture
		f.CompatibilityString = made.CompatibilityString
	}
	return facts
}

// Origin says in words what a build was converted from, "" if it was compiled.
func Origin(b *index.Build) string {
	if b.Converted.ID.IsZero() {
		return ""
	}
	return fmt.Sprintf("converted from the %s format, build %s of %s",
		FormName(!b.Embed), b.Converted.BuildKey, b.Converted.Created.Format(time.RFC3339))
}

// ShortKey is the prefix of the names of a build's files. It is made from the key, so that equal
// compiles write equal graphs, which contain these names.
func (p *Plan) ShortKey() string { return hex.EncodeToString(p.BuildKey[:8]) }

// OutputName is the name of a build's graph.
func (p *Plan) OutputName() string { return p.ShortKey() + "_ctx.onnx" }

// CheckGraph returns a job that loads a graph of the build at the level at which applications load
// it.
func (a *JudgeTarget) CheckGraph(b *index.Build, graph string) compilers.CheckJob {
	return a.CheckJob(graph,
		cmp.Or(b.GraphOptimizationLevel, LoadLevel(a.Canonical.GraphOptimizationLevel)))
}

// CheckJobOf returns a job that loads a build from its view. It loads a group's graphs in one
// process, in order.
func (a *JudgeTarget) CheckJobOf(b *index.Build, view *Answer) compilers.CheckJob {
	graph := filepath.Join(view.Path, filepath.FromSlash(view.Graph))
	job := a.CheckGraph(b, graph)
	for i := range b.Members {
		job.SessionOptions = SharingOptions(a.Canonical.SessionOptions)
		if i > 0 {
			job.Share = append(job.Share,
				filepath.Join(filepath.Dir(graph), filepath.FromSlash(b.Members[i].Graph)))
		}
	}
	return job
}

// CheckJobAlone is CheckJobOf without the options that make a group's members share.
func (a *JudgeTarget) CheckJobAlone(b *index.Build, view *Answer) compilers.CheckJob {
	job := a.CheckJobOf(b, view)
	job.SessionOptions = a.Canonical.SessionOptions
	return job
}

// SharingOptions returns session options with those that make the members of a group share.
func SharingOptions(options map[string]string) map[string]string {
	all := compilers.ShareOptions()
	maps.Copy(all, options)
	return all
}

// DigestOf is the BLAKE3 digest of the bytes.
func DigestOf(b []byte) [32]byte { return blake3.Sum256(b) }

// FormName returns "embedded" or "sidecar", for messages.
func FormName(embed bool) string {
	if embed {
		return "embedded"
	}
	return "sidecar"
}

// IsAdopted reports whether a build was made from a user's compiled model, so that the libraries
// that made it are unknown.
func IsAdopted(b *index.Build) bool {
	return b.Put && len(b.EPs) > 0 && b.EPs[0].LibraryDigest.IsZero()
}

// OpenDimension is a dimension of a model's inputs whose size neither the model nor the request
// fixes.
type OpenDimension struct {
	Name, Denotation string   // by which a request could fix it; both may be empty
	inputs           []string // the inputs with this dimension
}

// OpenDimensions lists the open dimensions in the order of the inputs, each name once.
func (r *Request) OpenDimensions(m *epmodel.Model) []OpenDimension {
	var out []OpenDimension
	fixed, err := identity.Denotations(r.FreeDimensionsByDenotation)
	if err != nil {
		fixed = nil // cannot happen: such a request was refused before
	}
	for _, in := range m.Inputs {
		for _, d := range in.Shape {
			_, named := r.FreeDimensions[d.Param]
			_, meant := fixed[strings.ToLower(d.Denotation)]
			if d.Value >= 0 || d.Param != "" && named || d.Denotation != "" && meant {
				continue
			}
			at := slices.IndexFunc(out, func(o OpenDimension) bool {
				return o.Name == d.Param && o.Denotation == d.Denotation
			})
			if at < 0 {
				at = len(out)
				out = append(out, OpenDimension{Name: d.Param, Denotation: d.Denotation})
			}
			if !slices.Contains(out[at].inputs, in.Name) {
				out[at].inputs = append(out[at].inputs, in.Name)
			}
		}
	}
	return out
}

// maxNamedDimensions bounds the dimensions in one message.
const maxNamedDimensions = 8

// DimensionsHint returns which dimensions to fix, and how, because execution providers that need to
// know every shape take few nodes otherwise.
func DimensionsHint(open []OpenDimension) string {
	var what, how []string
	for i, d := range open {
		if i == maxNamedDimensions {
			what = append(what, fmt.Sprintf("%d more", len(open)-i))
			break
		}
		of := " of " + QuotedNames(d.inputs)
		name, denotation := QuotedName(d.Name), QuotedName(d.Denotation)
		switch {
		case d.Name != "":
			what, how = append(what, name+of), append(how, "--dim "+name+"=N")
		case d.Denotation != "":
			what, how = append(what, denotation+of),
				append(how, "dims_by_denotation "+denotation+"=N in the file of --pipeline")
		default:
			what = append(what,
				"a dimension without a name"+of+", which only the model's author can fix")
		}
	}
	hint := "the model has free dimensions, which the execution provider may need to know: " +
		"" + strings.Join(what, ", ")
	if len(how) > 0 {
		hint += "; set them: " + strings.Join(how, " ")
	}
	return hint
}

// QuotedName returns a model's name as it can be typed: plain names unchanged, others in quotes.
func QuotedName(name string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' ||
			strings.ContainsRune("_-.:/", r)
	}
	name = identity.Truncated(name)
	if strings.IndexFunc(name, func(r rune) bool { return !plain(r) }) < 0 {
		return name
	}
	return strconv.Quote(name)
}

// QuotedNames lists names, the first few of them.
func QuotedNames(names []string) string {
	var list []string
	for i, name := range names {
		if i == maxNamedDimensions {
			list = append(list, fmt.Sprintf("%d more", len(names)-i))
			break
		}
		list = append(list, strconv.Quote(identity.Truncated(name)))
	}
	return strings.Join(list, " and ")
}
