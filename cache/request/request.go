// Package request has the values of a request while it is answered: the Request of an application,
// an Attempt to answer it, its Plan for a runtime, and the Answer. It reads no files of the store
// and starts no work.
package request

import (
	"cmp"
	"context"
	"os"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
)

// Peer is the process that sends a request.
type Peer = rights.Peer

// Progress is reported to a waiting caller.
type Progress = jobs.Progress

// OnMiss says what to do when there is no build.
type OnMiss int

const (
	Wait    OnMiss = iota // compile unless it is being compiled, and wait
	Fail                  // answer NotFound
	Refresh               // compile again even if there is a build
	Bypass                // neither look up nor store: compile for this caller only
	KeyOnly               // answer with the key and the record
	// decide, compile nothing, and answer with the decision and its reasons
	Explain
	Background // compile unless it is being compiled, and answer at once with the job
	Fetch      // query the remotes, compile nothing
	ForClaim   // let the caller compile it, unless it is being compiled: then wait
)

// MaxVersion bounds the text of a version that a client states, in bytes.
const MaxVersion = 100

// Request is a request of an application. The caller closes the files.
type Request struct {
	Peer     Peer
	Name     string // of the model, for messages; not part of the identity
	Path     string // where the client found it, never part of identity; "": not known
	Graph    *os.File
	External map[string]*os.File // by location

	// Group has more models, which are compiled after the first one in this order, so that all
	// share context binaries.
	Group []identity.Files

	identity.CompileTerms

	// Named has, by canonical name, the names under which the application registered execution
	// providers; nil if it used the canonical ones.
	Named map[string]string

	Runtime   runtimes.Ref
	StrictORT bool
	OnMiss    OnMiss
	Store     string // "", "shared", "user", "none"

	// VerifyOutput, unless 0, is a tolerance: the build and the source model are run once on zeros,
	// and each output may differ by so much, absolutely or relatively. It is not part of the
	// identity.
	VerifyOutput float64
	KeepGoing    bool // do not cancel the compile when no request waits any more
	// KeepsView: the caller keeps Answer.View while it uses the files. Otherwise the path is valid
	// for a limited time.
	KeepsView bool

	// Adopt stores a compiled model as a build. External then has the files that it refers to.
	Adopt bool

	// Repetition identifies requests of the same bytes with the same files; "": not known.
	Repetition string

	// Connection is done when the client disconnects, which ends its claims; nil: no connection.
	Connection context.Context
}

// RuntimeWanted describes the runtime that the request needs.
func (r *Request) RuntimeWanted() *runtimes.Wanted {
	return &runtimes.Wanted{Ref: r.Runtime, EPs: r.EPs, UID: r.Peer.UID, StrictORT: r.StrictORT,
		MayClaim: r.OnMiss == Wait && len(r.Group) == 0 && r.Store != "none"}
}

// Canonical returns the request with the canonical names of its execution providers. known may be
// nil.
func (r *Request) Canonical(known *runtimes.Set) *Request {
	eps, ref, named := known.Rename(r.EPs, r.Runtime)
	if named == nil {
		return r
	}
	out := *r
	out.EPs, out.Runtime, out.Named = eps, ref, named
	return &out
}

// Models returns the number of models.
func (r *Request) Models() int { return 1 + len(r.Group) }

// ModelFiles returns the files of one of the models. 0 is the first.
func (r *Request) ModelFiles(i int) identity.Files {
	if i == 0 {
		return identity.Files{Name: r.Name, Path: r.Path, Graph: r.Graph, External: r.External}
	}
	return r.Group[i-1]
}

// AllModels returns the files of every model.
func (r *Request) AllModels() []identity.Files {
	return append([]identity.Files{r.ModelFiles(0)}, r.Group...)
}

// AllFiles lists every file of the models in a fixed order.
func (r *Request) AllFiles() []*os.File { return identity.AllFiles(r.AllModels()...) }

// Descriptors lists the files of the models, each once.
func (r *Request) Descriptors() []*os.File { return identity.DistinctFiles(r.AllModels()...) }

// WithModels returns the request with other files of its models.
func (r *Request) WithModels(files []identity.Files) *Request {
	out := *r
	out.Graph, out.External, out.Group = files[0].Graph, files[0].External, files[1:]
	return &out
}

// WithOwnFiles returns the request with duplicates of its descriptors, because the caller may close
// its own.
func (r *Request) WithOwnFiles() (*Request, error) {
	files, err := identity.DuplicateAll(r.AllModels()...)
	if err != nil {
		return nil, err
	}
	return r.WithModels(files), nil
}

// WithoutFiles returns the request without its files and its connection.
func (r *Request) WithoutFiles() *Request {
	out := *r
	out.Graph, out.External = nil, nil
	out.Group = slices.Clone(out.Group)
	for i := range out.Group {
		out.Group[i].Graph, out.Group[i].External = nil, nil
	}
	out.Runtime, out.Repetition, out.Connection = runtimes.Ref{}, "", nil
	return &out
}

// Close closes the files of a request from WithOwnFiles.
func (r *Request) Close() { identity.CloseAll(r.AllModels()...) }

// Policy decides which builds are served that are not optimal for a runtime. The zero value is the
// default.
type Policy struct {
	Unknown             string // "load_check" (default): serve builds that load; "serve"; "refuse"
	PreferRecompilation string // "serve_and_refresh" (default), "serve", "refuse"
	Unsupported         string // "recompile" (default), "fail"
	// MaxAge: older builds are served, and compiled again in the background; 0: no limit.
	MaxAge      time.Duration
	MeasureGain *bool // measure how long the source model takes to load; nil: yes
}

// Values of policies.
const (
	PolicyLoadCheck       = "load_check"
	PolicyServe           = "serve"
	PolicyRefuse          = "refuse"
	PolicyServeAndRefresh = "serve_and_refresh"
	PolicyRecompile       = "recompile"
	PolicyFail            = "fail"
)

// Stricter is the stricter of two policies, in each field.
func (p Policy) Stricter(q Policy) Policy {
	p.Unknown = stricter(p.Unknown, q.Unknown, PolicyLoadCheck, PolicyServe, PolicyLoadCheck,
		PolicyRefuse)
	p.PreferRecompilation = stricter(p.PreferRecompilation, q.PreferRecompilation,
		PolicyServeAndRefresh, PolicyServe, PolicyServeAndRefresh, PolicyRefuse)
	p.Unsupported = stricter(p.Unsupported, q.Unsupported, PolicyRecompile,
		PolicyRecompile, PolicyFail)
	if q.MaxAge > 0 && (p.MaxAge == 0 || q.MaxAge < p.MaxAge) {
		p.MaxAge = q.MaxAge
	}
	p.MeasureGain = cmp.Or(p.MeasureGain, q.MeasureGain)
	return p
}

// stricter returns the one of a and b that comes later in order. "" counts as usual.
func stricter(a, b, usual string, order ...string) string {
	if slices.Index(order, cmp.Or(b, usual)) > slices.Index(order, cmp.Or(a, usual)) {
		return b
	}
	return a
}
