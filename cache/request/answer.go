package request

import (
	"os"
	"path"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/views"
	"github.com/epcached/epcached/unixsock/wire"
)

// Reply is the answer as clients receive it, without the time that it took.
func (a *Answer) Reply() *wire.AcquireReply {
	reply := &wire.AcquireReply{
		Outcome: a.Outcome, ModelDigest: a.ModelDigest.String(),
		Compatibility:       a.Compatibility.Verdict.String(),
		CompatibilitySource: a.Compatibility.Source,
		CompatibilityReason: wire.Valid(a.Compatibility.Reason), Why: wire.Valid(a.Why),
		Record: a.Record, Explanation: a.Explanation, Runtime: a.Runtime, Job: a.Job,
		Warnings: a.Warnings, View: a.Path, Graph: a.Graph, SessionOptions: a.SessionOptions,
		GraphOptimizationLevel: a.GraphOptimizationLevel, RequestKey: wire.KeyText(a.RequestKey),
		Member: uint32(a.Member), Unkept: a.Unkept,
	}
	if a.Claim != nil {
		c := a.Claim
		reply.Claim = &wire.Claim{Id: c.ID, Output: c.Output, Outputs: []string{c.Output},
			DeadlineMs: time.Until(c.Deadline).Milliseconds(), Route: c.Route}
	}
	if a.ProviderOptions != nil {
		reply.ProviderOptions = make(map[string]*wire.StringMap, len(a.ProviderOptions))
		for ep, options := range a.ProviderOptions {
			reply.ProviderOptions[ep] = &wire.StringMap{Entries: options}
		}
	}
	for _, m := range a.Members {
		reply.Members = append(reply.Members, &wire.Member{Name: m.Name,
			ModelDigest: m.ModelDigest.String(), Graph: m.Graph, SessionOptions: m.SessionOptions})
	}
	if b := a.Build; b != nil {
		reply.Build, reply.CompileSeconds = b.BuildKey.String(), b.CompileSeconds
		ep := b.Maker()
		reply.Ep, reply.SdkVersion, reply.HardwareArchitecture = ep.Name, ep.SDKVersion,
			ep.HardwareArchitecture
		id, _, inView := strings.Cut(a.Graph, "/")
		for _, f := range b.Files {
			one := &wire.File{Name: f.Name, Size: f.Size}
			if inView { // else the files are read from a store that has no view of them
				one.Name = id + "/" + f.Name
			}
			if !f.Digest.IsZero() { // else there is none
				one.Digest = f.Digest.String()
			}
			reply.Files = append(reply.Files, one)
		}
	}
	return reply
}

// Member is one model of a group, in an answer.
type Member struct {
	Name        string
	ModelDigest cas.Digest
	Graph       string // relative to the view: "<id>/<graph>"
	// besides the answer's, when several members are loaded in one process
	SessionOptions map[string]string
}

// FillMembers says what a group consists of, and which of its models was asked for.
func (a *Answer) FillMembers(r *Request, model cas.Digest) {
	b := a.Build
	if len(b.Members) == 0 {
		return
	}
	dir, members := path.Dir(a.Graph), b.Members
	if len(r.Group) > 0 {
		members = r.NamedMembers(members)
	}
	for i := range members {
		m := &members[i]
		a.Members = append(a.Members, Member{Name: m.ModelName, ModelDigest: m.ModelDigest,
			Graph: path.Join(dir, m.Graph), SessionOptions: m.SessionOptions})
	}
	a.Member = max(0, b.MemberOf(model))
	a.Graph = a.Members[a.Member].Graph
}

// Claim is the right, and the promise, to compile what others may be waiting for.
type Claim struct {
	ID       string
	Output   string // name of the graph that is to be put
	Route    string // by which it is to be compiled
	Deadline time.Time
}

// The outcomes of a request.
const (
	Hit         = "hit"
	Compiled    = "compiled"    // by this request
	Waited      = "waited"      // by another request for the same, which this one waited for
	PassThrough = "passthrough" // the model is compiled already: load it as it is
	Key         = "key"         // only the key was asked for
	Explained   = "explanation" // only the decision was asked for, and its reasons
	Later       = "background"  // it is being compiled: Answer.Job is the job
	Claimed     = "claim"       // the caller is to compile it: Answer.Claim says how
	Taken       = "put"         // what the caller compiled is kept: the answer to a Put
	Adopted     = "adopted"     // the caller's compiled model is kept now
)

// Answer is what a request got. View, where there is one, is the caller's to close: it is the
// lease.
type Answer struct {
	Outcome     string
	RequestKey  index.RequestKey
	ModelDigest cas.Digest
	Record      string       // the request record as JSON
	Build       *index.Build // nil for PassThrough and Key; shared: read only
	// Build is not kept: its files are removed with View, and have no digests
	Unkept        bool
	Compatibility judge.Judgement
	// of the build's job, with the request's tolerance; nil: of none
	Compared    *compilers.VerifyResult
	Why         string
	Explanation *wire.Explanation // for Explain
	Runtime     string            // what the answer is for
	Job         string            // of Later: what Follow and CancelJobs name
	Claim       *Claim            // of Claimed

	LeasedView *views.View // that View is of
	View       *os.File
	Path       string // of the view
	Graph      string // relative to the view: "<id>/<graph>"

	// of a group: all of them, in the order to load several in one process; else none
	Members []Member
	Member  int // which of them was asked for

	ProviderOptions        map[string]map[string]string // by EP: load the graph with exactly these
	SessionOptions         map[string]string
	GraphOptimizationLevel string // "" where it does not matter
	Warnings               []string
}
