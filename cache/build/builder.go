// Package build makes builds: from a plan, through a worker's compile in a private directory, to
// files that are checked, loaded once and published; and from a build to its other form.
package build

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/plan"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/trial"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/store"
)

// Settings may change while a Builder works.
type Settings struct {
	KeepSource string          // how source models are kept: KeepReference, KeepCopy or KeepNone
	Failures   failure.Options // how long failures are remembered
}

// Options say what a Builder works with.
type Options struct {
	Dir        string // the state directory
	UID        uint32 // the daemon's user
	Store      *store.Store
	Jobs       *jobs.Jobs
	Compiler   compilers.Compiler
	Models     *identity.Models
	Sources    *identity.Sources
	Workspaces *workspace.Maker
	Planner    *plan.Planner
	Lookup     *lookup.Lookup
	Trials     *trial.Trials
	Failures   *failure.Remembered
	Rights     *rights.Rights
	MaxGraph   int64 // bytes of a graph with an embedded context
	Log        *slog.Logger
	Now        func() time.Time

	Settings func() Settings
	Policy   func([]compilers.EP) request.Policy
	// Owner returns the user that a user of a container belongs to.
	Owner func(uid uint32) uint32
	// Later runs a function that the daemon waits for when it ends.
	Later func(func(context.Context))
	// MayPut says why a user may not keep files of these sizes, of builds that applications put.
	MayPut func(ctx context.Context, owner uint32, model string, sizes []int64) (int64, error)
	// Queued is called for a job that outlives its request.
	Queued func(*jobs.Job, *request.Attempt)
	// Stored is called when a job has stored its build. The job's files are open until then.
	Stored func(at *request.Attempt, b *index.Build, ended <-chan struct{})
}

// Builder makes builds: it compiles models in jobs, and converts builds into their other form.
type Builder struct {
	Options

	conversions keyed.Group[*jobs.Result] // by build key, scope and what is converted
	leaving     atomic.Bool
}

// New returns a Builder.
func New(o Options) *Builder { return &Builder{Options: o} }

// Leave says that the daemon is about to end: a worker that dies is not replaced, and its death
// counts against no model.
func (bd *Builder) Leave() { bd.leaving.Store(true) }
