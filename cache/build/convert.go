package build

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
)

// Convert answers a miss from a build of the same model whose context binary is embedded where the
// request wants a sidecar file, or the reverse. It moves the context into or out of the graph, at
// the speed of a copy, and compiles nothing. It returns nil if there is no such build or it cannot
// be converted.
func (bd *Builder) Convert(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
	if len(at.Group) > 0 || at.AsMember {
		return nil, nil // the members of a group share one context
	}
	found, err := bd.Lookup.Find(ctx, bd.OtherFormAttempt(at))
	if err != nil || found.Answer == nil {
		return nil, err
	}
	if len(found.Answer.Build.Members) > 0 || bd.IsWithheldCopy(at, found.Answer.Build) {
		return nil, found.Answer.View.Close()
	}
	from, judgement := found.Answer.Build, found.Answer.Compatibility
	defer found.Answer.View.Close()
	at.Phase("converting")
	result, err := bd.ConvertOnce(ctx, at, from)
	switch {
	case ctx.Err() != nil:
		return nil, request.ContextError(ctx, at.Name)
	case errors.As(err, new(*epmodel.TooLargeError)):
		return nil, apierr.New(apierr.CompileFailed, err, "model %q cannot be embedded", at.Name).
			WithFact("reason", "too large").
			WithHint("request it without embedding: its context then is a file beside the graph")
	case err != nil:
		bd.Log.Info("build not converted",
			"model", at.Name, "build", from.BuildKey.String(), "why", err)
		return nil, nil // it is compiled instead
	}
	a, err := bd.serveCompiled(ctx, result, at.Phase)
	if err != nil {
		return nil, request.UnservableError(err, at.Name, "converted")
	}
	judgement.Reason += "; " + request.Origin(result.Build)
	a.Outcome, a.Compatibility, a.Why = request.Hit, judgement, request.Origin(result.Build)
	return a, nil
}

// IsWithheldCopy reports whether a requested build is withheld that came from the same compile as
// from. Converting from would then serve the withheld context again.
func (bd *Builder) IsWithheldCopy(at *request.Attempt, from *index.Build) bool {
	for b, err := range bd.Lookup.StoredBuilds(at.Plan, at.Scopes) {
		if err != nil { // the compile fails with it
			return true
		}
		if bd.Store.Index().Journal.StateOf(b.ID).Name == index.Withheld &&
			b.Compiled().Equal(from.Compiled()) {
			return true
		}
	}
	return false
}

// OtherFormAttempt returns the attempt for the same build with the context embedded instead of in a
// sidecar file, or the reverse.
func (bd *Builder) OtherFormAttempt(at *request.Attempt) *request.Attempt {
	r, out := *at.Request, *at.Plan
	r.Embed = !at.Embed
	out.Canonical.Embed = !at.Plan.Canonical.Embed
	out.RequestKey, out.Record = out.Canonical.Key()
	out.RecordJSON = out.Canonical.JSON()
	bd.Planner.Name(&out, at.Content)
	return at.WithRequest(&r).WithPlan(&out)
}

// conversion converts one build from embedded to sidecar, or back.
type conversion struct {
	bd               *Builder
	*request.Attempt // of the first request; its files are not used
	from             *index.Build
	scope            string // "" to keep nothing
	dir              string
}

// ConvertOnce converts the build from to what the attempt wants, once for all requests for it.
func (bd *Builder) ConvertOnce(ctx context.Context, at *request.Attempt, from *index.Build) (
	*jobs.Result, error) {
	scope := at.Scope
	if scope != "" && from.Scope != "shared" {
		scope = from.Scope // a private build stays private when it is converted
	}
	key := at.Plan.BuildKey.String() + scope + from.ID.String()
	if scope == "" {
		key += jobs.NewID()
	}
	return bd.conversions.Do(ctx, bd.RunLater, key,
		func(ctx context.Context) (*jobs.Result, error) {
			leave, err := bd.Workspaces.AcquireSlot(ctx, at.Request)
			if err != nil {
				return nil, err
			}
			defer leave()
			return (&conversion{bd: bd, Attempt: at, from: from, scope: scope}).run(ctx)
		})
}

func (v *conversion) run(ctx context.Context) (*jobs.Result, error) {
	if b, err := v.earlierResult(); b != nil || err != nil {
		return &jobs.Result{Build: b}, err // converted between the caller's look-up and here
	}
	// A lease of its own, because the request may end.
	source, err := lookup.Lease(ctx, v.bd.Store, v.from, func(string) {})
	if err != nil {
		return nil, err
	}
	defer source.View.Close()
	reservation, noRoom := v.bd.Store.Reserve(ctx, v.from.UID, true, sizesOf(v.from.Files)...)
	defer reservation.Release() // after the directory is removed
	var remove func()
	if v.dir, remove, err = v.bd.Store.Stage("convert-"); err != nil {
		return nil, err
	}
	defer remove()
	if noRoom == nil && v.from.Put {
		_, noRoom = v.bd.MayPut(ctx, v.bd.Owner(v.from.UID), v.Name, sizesOf(v.from.Files))
	}
	view, _, _ := strings.Cut(source.Graph, "/")
	form := Form{Of: v.from, Embed: v.Plan.Canonical.Embed, Graph: v.Plan.OutputName(),
		MaxGraph: v.bd.MaxGraph, Dir: v.dir}
	files, err := form.Write(ctx, filepath.Join(source.Path, view))
	if err != nil {
		return nil, err
	}
	b, err := v.check(ctx, files)
	if err != nil {
		return nil, err
	}
	if v.scope == "" {
		return v.bd.createUnkeptView(b, v.dir)
	}
	if noRoom != nil {
		return v.bd.serveUnkept(b, v.dir, noRoom)
	}
	hold := v.bd.Store.Blobs().Hold()
	defer v.bd.Store.Packing().Release(hold) // after a view of an unkept build has its links
	if b.Source.Kind == index.SourceCopy && !allKept(ctx, hold, b.Source.Files) {
		b.Source = index.Source{Why: index.WhyFailed}
	}
	err = v.bd.Store.Publish(ctx, store.Publication{Build: b, Dir: v.dir, UID: v.Peer.UID,
		Reservation: reservation, Kind: event.Converted, Text: request.Origin(b),
		Counter: "conversions"},
		hold)
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, err
	case err != nil:
		return v.bd.serveUnkept(b, v.dir, err)
	}
	return &jobs.Result{Build: b}, nil
}

func sizesOf(files []index.File) (sizes []int64) {
	for _, f := range files {
		sizes = append(sizes, f.Size)
	}
	return sizes
}

// earlierResult returns the result of an earlier conversion of the build, nil if there is none.
func (v *conversion) earlierResult() (*index.Build, error) {
	if v.scope == "" {
		return nil, nil
	}
	x := v.bd.Store.Index()
	builds, err := x.Lookup(v.Plan.RequestKey, v.scope)
	for i := range builds {
		b := &builds[i]
		if b.Converted.ID == v.from.ID && x.Journal.StateOf(b.ID).Name == index.Current {
			return b, nil
		}
	}
	return nil, err
}

// check validates the files, loads them in a process of their own, and returns the build's record.
func (v *conversion) check(ctx context.Context, files []string) (*index.Build, error) {
	graph := v.Plan.OutputName()
	models, _, err := ReadOutput(ctx, v.dir, compilers.Result{Graph: graph, Files: files})
	if err != nil {
		return nil, err
	}
	b := v.record(models[0], files)
	level := request.LoadLevel(v.Plan.Canonical.GraphOptimizationLevel)
	job := v.Plan.JudgeTarget("", v.Content).
		CheckJob(filepath.Join(v.dir, graph), cmp.Or(v.from.GraphOptimizationLevel, level))
	checked, err := runtimes.RunUnreplaced(v.Content, func() (compilers.CheckResult, error) {
		return v.bd.Compiler.Check(ctx, job)
	})
	if err != nil {
		return nil, err
	}
	if checked.Outcome == compilers.Failed {
		return nil, fmt.Errorf("it does not load: %s", checked.Cause())
	}
	b.LoadCheck = checked.Recorded()
	if checked.GraphOptimizationLevel == "disable_all" {
		b.GraphOptimizationLevel = checked.GraphOptimizationLevel
	}
	return b, nil
}

// record returns the record of the converted build, without digests of files: its source's record
// with the keys that the attempt has.
func (v *conversion) record(m *epmodel.Model, files []string) *index.Build {
	b := *v.from
	b.ID, b.RequestKey, b.BuildKey = index.BuildID{}, v.Plan.RequestKey, v.Plan.BuildKey
	if v.bd.OtherFormAttempt(v.Attempt).Plan.BuildKey != v.from.BuildKey {
		// Other libraries or another machine made it.
		b.BuildKey = identity.BuildKey(v.Plan.RequestKey, v.from.EPs, v.from.Route)
	}
	b.Record, b.RecordJSON, b.Embed = v.Plan.Record, v.Plan.RecordJSON, v.Plan.Canonical.Embed
	b.Scope, b.Graph, b.IRVersion, b.Created = v.scope, v.Plan.OutputName(), m.IRVersion, v.bd.Now()
	b.ModelName, b.ModelPath = v.Name, v.Path
	if !b.Put { // otherwise the user of the application that compiled it stays responsible
		b.UID = v.Peer.UID
	}
	if b.UID != v.from.UID && b.Source.Kind == index.SourceReference {
		b.Source = index.Source{Why: index.WhyAnothers}
	}
	b.Converted = index.Origin{ID: v.from.ID, BuildKey: v.from.BuildKey, Created: v.from.Compiled()}
	b.VerifiedOutput = 0
	b.Files = nil
	for _, name := range files {
		b.Files = append(b.Files, index.File{Name: name})
	}
	return &b
}

// Form says how to write a build with its context in the graph, or in a file beside it.
type Form struct {
	Of       *index.Build
	Embed    bool
	Graph    string // name of the graph to write
	MaxGraph int64  // limit in bytes of a graph with its context
	Dir      string // directory to write to
}

// Write converts the files in the directory from, and returns the names of those that it wrote, the
// graph first.
func (v *Form) Write(ctx context.Context, from string) ([]string, error) {
	in := openFiles{dir: from}
	defer in.Close()
	graph, err := in.source(v.Of.Graph)
	if err != nil {
		return nil, err
	}
	m, err := epmodel.Read(ctx, v.Of.Graph, graph)
	if err != nil {
		return nil, err
	}
	var written *epmodel.Splice
	var contexts []epmodel.DetachedContext
	if v.Embed {
		written, err = v.embedded(ctx, m, graph, &in)
	} else {
		written, contexts, err = epmodel.Detach(ctx, m, graph, v.Graph, identity.Sum)
	}
	if err != nil {
		return nil, err
	}
	if err := workspace.CheckSpace(v.Dir, in.Open); err != nil {
		return nil, err
	}
	files := []string{v.Graph}
	if err := workspace.Write(ctx, v.path(v.Graph), written); err != nil {
		return nil, err
	}
	for _, one := range contexts {
		if err := workspace.Write(ctx, v.path(one.Name), one.Bytes); err != nil {
			return nil, err
		}
		files = append(files, one.Name)
	}
	rest, err := v.copyRest(m, from)
	return append(files, rest...), err
}

func (v *Form) embedded(ctx context.Context, m *epmodel.Model, graph epmodel.Source,
	in *openFiles) (*epmodel.Splice, error) {
	bins := make(map[string]epmodel.Source)
	for _, name := range m.ContextFiles() {
		var err error
		if bins[name], err = in.source(name); err != nil {
			return nil, err
		}
	}
	return epmodel.Embed(ctx, m, graph, bins, v.MaxGraph)
}

// copyRest copies files that are neither graph nor context, such as external initializers.
func (v *Form) copyRest(m *epmodel.Model, from string) ([]string, error) {
	done := append(m.ContextFiles(), v.Of.Graph)
	var names []string
	for _, f := range v.Of.Files {
		if slices.Contains(done, f.Name) {
			continue
		}
		path := filepath.Join(from, filepath.FromSlash(f.Name))
		if err := workspace.CopyPath(path, v.path(f.Name)); err != nil {
			return nil, err
		}
		names = append(names, f.Name)
	}
	return names, nil
}

func (v *Form) path(name string) string {
	return filepath.Join(v.Dir, filepath.FromSlash(name))
}

// openFiles are files of a view, open for reading.
type openFiles struct {
	workspace.OpenFiles
	dir string
}

func (o *openFiles) source(name string) (epmodel.Source, error) {
	if name == "" || !filepath.IsLocal(filepath.FromSlash(name)) || strings.ContainsRune(name, 0) {
		return nil, fmt.Errorf("%q is not the name of a file of a build", name)
	}
	return o.OpenFiles.Source(filepath.Join(o.dir, filepath.FromSlash(name)))
}
