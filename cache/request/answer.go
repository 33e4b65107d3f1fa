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
	if a.Encoded != nil {
		return a.Encoded.Again()
	}
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
			if inView { // otherwise the client reads the files from the store itself
				one.Name = id + "/" + f.Name
			}
			if !f.Digest.IsZero() { // unset in an unkept build
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
	// SessionOptions are needed in addition to the answer's when one process loads several members.
	SessionOptions map[string]string
}

// FillMembers sets the answer's members, and which of them the request is for.
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

// Claim lets a client compile a model itself. Other requests wait for its result.
type Claim struct {
	ID       string
	Output   string // name of the graph to put
	Route    string // the route to compile by
	Deadline time.Time
}

// The outcomes of a request.
const (
	Hit         = "hit"
	Compiled    = "compiled"    // by this request
	Waited      = "waited"      // compiled by another request, for which this one waited
	PassThrough = "passthrough" // the model is compiled already: load it unchanged
	Key         = "key"         // the request was only for the key
	Explained   = "explanation" // the request was only for the decision and its reasons
	Later       = "background"  // it is being compiled, by Answer.Job
	Claimed     = "claim"       // the caller has to compile it, as Answer.Claim says
	Taken       = "put"         // the caller's artefact is stored: the answer to a Put
	Adopted     = "adopted"     // the caller's compiled model is now stored
)

// Answer is the answer to a request. View is the lease; the caller closes it unless it is nil.
type Answer struct {
	Outcome     string
	RequestKey  index.RequestKey
	ModelDigest cas.Digest
	Record      string       // the request record as JSON
	Build       *index.Build // nil for PassThrough and Key; shared: read only
	// Unkept: the build is not stored. Its files are removed with View, and have no digests.
	Unkept        bool
	Compatibility judge.Judgement
	// Compared is the comparison of outputs, if the build's job made one with the request's
	// tolerance.
	Compared    *compilers.VerifyResult
	Why         string
	Explanation *wire.Explanation // for Explain
	Runtime     string            // name of the runtime
	Job         string            // of Later: id of the job
	Claim       *Claim            // of Claimed

	// Encoded, unless nil, is the whole reply. Only the view's fields are set beside it.
	Encoded *wire.AcquireReply

	LeasedView *views.View // the view that View keeps
	View       *os.File
	Path       string // of the view
	Graph      string // relative to the view: "<id>/<graph>"

	// Members of a group, in the order in which one process has to load them.
	Members []Member
	Member  int // index of the requested one

	ProviderOptions        map[string]map[string]string // by EP: load the graph with exactly these
	SessionOptions         map[string]string
	GraphOptimizationLevel string // "" where it does not matter
	Warnings               []string
}
