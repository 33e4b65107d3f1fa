// Package request has what a request is while it is answered: what an application asks for, one
// attempt at it, the plan for a runtime, and the answer. It reads no files of the store and starts
// nothing.
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

// The wishes of a request.
const (
	Wait    OnMiss = iota // compile unless it is being compiled, and wait
	Fail                  // answer NotFound
	Refresh               // compile again even if there is a build
	Bypass                // neither look up nor keep: compile for this caller only
	KeyOnly               // answer with the key and the record
	// decide, compile nothing, and answer with the decision and its reasons
	Explain
	Background // compile unless it is being compiled, and answer at once with the job
	Fetch      // ask the remotes, compile nothing
	ForClaim   // let the caller compile it, unless it is being compiled: then wait
)

// MaxVersion bounds what a client says that a version is, in bytes.
const MaxVersion = 100

// Request is what an application asks for. The files stay the caller's to close.
type Request struct {
	Peer     Peer
	Name     string // of the model, for people; never part of identity
	Path     string // where the client found it, never part of identity; "": not known
	Graph    *os.File
	External map[string]*os.File // by location

	// Group are further models, compiled together with the one above, after it and in this order,
	// so that all share context binaries.
	Group []identity.Files

	identity.CompileTerms

	Runtime   runtimes.Ref
	StrictORT bool
	OnMiss    OnMiss
	Store     string // "", "shared", "user", "none"

	// VerifyOutput, where it is not 0, has the build run once on zeros beside the model: a value
	// may differ by so much, as it is or as a part of the model's. No part of the identity.
	VerifyOutput float64
	KeepGoing    bool // finish the compile even if no request waits any more
	// the caller keeps Answer.View for as long as it uses the files; else the path lasts for some
	// time
	KeepsView bool

	// Adopt has a compiled model kept, with the files that it refers to, which are External then.
	Adopt bool

	// Connection ends with the client's connection, and ends its claims; nil: the client has none.
	Connection context.Context
}

// RuntimeWanted is the runtime that the request asks for.
func (r *Request) RuntimeWanted() *runtimes.Wanted {
	return &runtimes.Wanted{Ref: r.Runtime, EPs: r.EPs, UID: r.Peer.UID, StrictORT: r.StrictORT,
		MayClaim: r.OnMiss == Wait && len(r.Group) == 0 && r.Store != "none"}
}

// Models counts the models that are asked for.
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

// WithModels is the request with other files of its models.
func (r *Request) WithModels(files []identity.Files) *Request {
	out := *r
	out.Graph, out.External, out.Group = files[0].Graph, files[0].External, files[1:]
	return &out
}

// WithOwnFiles is the request with descriptors of its own, because the caller may leave.
func (r *Request) WithOwnFiles() (*Request, error) {
	files, err := identity.DuplicateAll(r.AllModels()...)
	if err != nil {
		return nil, err
	}
	return r.WithModels(files), nil
}

// Close closes the files of a request that is the cache's own.
func (r *Request) Close() { identity.CloseAll(r.AllModels()...) }

// Policy says what to do with builds that are not the best for a runtime. The zero value is the
// default.
type Policy struct {
	Unknown             string // "load_check" (default): serve what loads; "serve"; "refuse"
	PreferRecompilation string // "serve_and_refresh" (default), "serve", "refuse"
	Unsupported         string // "recompile" (default), "fail"
	// builds older than this are served, and compiled again in the background; 0: any age
	MaxAge            time.Duration
	MinCompileSeconds float64 // what compiles faster is answered but not kept
	MeasureGain       *bool   // measure how long the source model takes to load; nil: yes
}

// The words of policies.
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
	p.MinCompileSeconds = min(p.MinCompileSeconds, q.MinCompileSeconds)
	p.MeasureGain = cmp.Or(p.MeasureGain, q.MeasureGain)
	return p
}

// stricter returns the one of a and b that comes later in order; what is empty counts as usual.
func stricter(a, b, usual string, order ...string) string {
	if slices.Index(order, cmp.Or(b, usual)) > slices.Index(order, cmp.Or(a, usual)) {
		return b
	}
	return a
}
