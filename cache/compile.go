package cache

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
)

// compiled is what a flight brings: a build in the store, or, where nothing is to be kept, a view of its own.
type compiled struct {
	build *index.Build
	alone *view  // nil when the build is in the store
	why   string // it is not, where that is not what was asked for
}

// compileOnce compiles the model, or waits for whoever does, and answers with a lease on the result.
func (c *Cache) compileOnce(ctx context.Context, r *Request, id identity, p *plan, rc *runtimeContent, why string, phase func(string)) (*Answer, error) {
	scope, _ := c.scopes(r, id)
	key := flightKey{build: p.buildKey, scope: scope}
	if scope == "" || r.OnMiss == Bypass {
		scope, key.scope, key.alone = "", "", newID()
	}
	result, first, err := c.flights.join(ctx, key, phase, func() (flightRun, error) {
		j, err := c.newJob(r, p, rc, scope)
		if err != nil {
			return nil, err
		}
		return j.run, nil
	})
	if err != nil {
		if ctx.Err() != nil {
			return nil, contextError(ctx, r)
		}
		return nil, err
	}
	a, err := c.serveCompiled(ctx, result, phase)
	if err != nil {
		return nil, fail(Internal, err, "model %q: compiled, but cannot be served", r.Name)
	}
	a.Outcome, a.Why = Waited, "compiled by another request for the same"
	if first {
		a.Outcome, a.Why = Compiled, why
	}
	if result.why != "" {
		a.Why = result.why
	}
	return a, nil
}

func (c *Cache) serveCompiled(ctx context.Context, result *compiled, phase func(string)) (*Answer, error) {
	if result.alone == nil {
		return c.serve(ctx, result.build, phase)
	}
	v := result.alone
	f, err := v.lease(c.now())
	if err != nil {
		return nil, err
	}
	c.doomLater(v) // nobody finds it again: it goes with its last holder
	return &Answer{Build: result.build, View: f, Path: v.path, Graph: v.id + "/" + v.graph}, nil
}

// job is one compile. It has descriptors of its own, for the caller who asked first may leave.
type job struct {
	c       *Cache
	request *Request
	plan    *plan
	rc      *runtimeContent
	scope   string // "" to keep nothing
	folder  string
	name    string // 16 hex digits of the build key: EPs write file names into what they make

	urgent    <-chan struct{} // closed as soon as a request waits for this job
	locations []string        // of external data, once the model is copied
	cpu       atomic.Int64    // nanoseconds that workers took of all processors
	anew      string          // why the daemon itself compiles this again; "" where a request began it
	source    index.Source    // then: where it has the model from
	load      float64         // seconds that the compiled model took to load; 0: it was not loaded
}

func (c *Cache) newJob(r *Request, p *plan, rc *runtimeContent, scope string) (*job, error) {
	own, err := r.own()
	if err != nil {
		return nil, fail(Internal, err, "model %q", r.Name)
	}
	return &job{c: c, request: own, plan: p, rc: rc, scope: scope, name: hex.EncodeToString(p.buildKey[:8])}, nil
}

func (j *job) run(ctx context.Context, phase func(string), urgent <-chan struct{}) (*compiled, error) {
	defer j.request.close()
	c := j.c
	j.urgent = urgent
	phase("queued")
	if err := j.awaitSlot(ctx); err != nil {
		return nil, err
	}
	defer j.leaveSlot()
	var err error
	if err = os.MkdirAll(c.path("staging"), 0o700); err != nil { // somebody may have deleted it
		return nil, storeError(err, j.request.Name)
	}
	if j.folder, err = os.MkdirTemp(c.path("staging"), "job-"); err != nil {
		return nil, storeError(err, j.request.Name)
	}
	defer func() {
		if err := os.RemoveAll(j.folder); err != nil {
			c.log.Warn("staging folder not removed", "path", j.folder, "error", err)
		}
	}()
	result, err := j.compile(ctx, phase)
	if err != nil {
		if j.anew != "" {
			return nil, err // whoever wanted it tells
		}
		c.index.Count("failures", 1)
		c.log.Info("compile failed", "model", j.request.Name, "error", err)
		c.happened(eventFor(j.request.Peer, j.plan.requestKey, j.request.Name, EventFailed, "%v", err))
		return nil, err
	}
	c.index.Count("compiles", 1)
	return result, nil
}

// awaitSlot waits until the job may run. What the daemon compiles by itself takes no slot, so that a request never
// waits for it: the queue that it comes from bounds it.
func (j *job) awaitSlot(ctx context.Context) error {
	if j.anew != "" {
		return nil
	}
	select {
	case j.c.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fail(Cancelled, ctx.Err(), "model %q", j.request.Name)
	}
}

func (j *job) leaveSlot() {
	if j.anew == "" {
		<-j.c.slots
	}
}

// spent counts what a worker took.
func (j *job) spent(seconds float64) {
	j.cpu.Add(int64(seconds * float64(time.Second)))
}

// compile makes the artefact in the staging folder and publishes it.
func (j *job) compile(ctx context.Context, phase func(string)) (*compiled, error) {
	phase("reading")
	model, err := j.copyModel(ctx)
	if err != nil {
		return nil, err
	}
	out := filepath.Join(j.folder, "out")
	if err := os.Mkdir(out, 0o700); err != nil {
		return nil, storeError(err, j.request.Name)
	}
	phase("compiling")
	spec := compilers.Job{
		Runtime: j.rc.spec, EPs: j.plan.eps, Model: model, Folder: out, Output: j.name + "_ctx.onnx",
		SessionOptions: j.request.SessionOptions, FreeDimensions: j.request.FreeDimensions,
		FreeDimensionsByDenotation: j.request.FreeDimensionsByDenotation,
		GraphOptimizationLevel:     j.plan.canonical.GraphOptimizationLevel, Embed: j.request.Embed, Route: j.plan.canonical.Route,
		Idle: j.urgent,
	}
	result, err := j.c.compiler.Compile(ctx, spec, func(string) {})
	j.spent(result.CPUSeconds)
	if ctx.Err() == nil && !j.rc.stands() {
		return nil, j.moved()
	}
	if err != nil {
		if free, err2 := freeBytes(out); err2 == nil && free < spare {
			return nil, fail(NoSpace, err, "model %q does not compile, and only %d bytes are free in %q", j.request.Name, free, j.c.dir)
		}
		return nil, workerError(err, "model %q does not compile", j.request.Name)
	}
	phase("checking")
	b, err := j.check(ctx, out, result)
	if ctx.Err() == nil && !j.rc.stands() {
		return nil, j.moved()
	}
	if err != nil {
		return nil, err
	}
	phase("storing")
	if j.scope == "" {
		return j.c.keepAlone(b, out)
	}
	if least := j.c.policyOf(j.plan.eps).MinCompileSeconds; b.CompileSeconds < least {
		result, err := j.c.keepAlone(b, out)
		if err == nil {
			result.why = fmt.Sprintf("compiled in %.3f s, which is less than min_compile_seconds, %g s: not kept", b.CompileSeconds, least)
		}
		return result, err
	}
	return j.store(ctx, b, out)
}

// moved is the end of a compile during which the runtime's libraries changed: what came of it, a crash as well, may
// be of neither version, and belongs to no build key.
func (j *job) moved() error {
	return fail(Busy, errMoving, "model %q: the runtime's libraries changed during the compile", j.request.Name).hint("ask again")
}

// copyModel makes the private copy that is compiled, and proves that it has the bytes that the key is made of.
func (j *job) copyModel(ctx context.Context) (string, error) {
	if err := j.makeRoom(); err != nil {
		return "", storeError(err, j.request.Name)
	}
	path := filepath.Join(j.modelFolder(), j.name+".onnx")
	if err := copyPrivate(j.request.Graph, path); err != nil {
		return "", storeError(err, j.request.Name)
	}
	got, err := j.copyExternal(ctx, path)
	if err != nil {
		return "", err
	}
	if got != j.plan.canonical.Model {
		return "", j.changed()
	}
	return path, nil
}

func (j *job) makeRoom() error {
	err := room(j.folder, j.request.files())
	if err != nil {
		j.c.gains.giveUp()
		err = room(j.folder, j.request.files())
	}
	return err
}

func (j *job) modelFolder() string { return filepath.Join(j.folder, "model") }

func (j *job) changed() error {
	return fail(BadModel, nil, "model %q changed while being read", j.request.Name).
		hint("wait until whatever writes it is done, and ask again")
}

// copyExternal copies the external data beside the copy of the graph, and gives the digest of both. Only what the
// graph refers to is copied, for that was checked: what else a client sent may have any name.
func (j *job) copyExternal(ctx context.Context, path string) (cas.Digest, error) {
	var open []*os.File
	defer func() {
		for _, f := range open {
			_ = f.Close() // opened for reading only: nothing can be lost
		}
	}()
	source := func(path string) (epmodel.Source, error) {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		open = append(open, f)
		return epmodel.FileSource(f)
	}
	graph, err := source(path)
	if err != nil {
		return cas.Digest{}, storeError(err, j.request.Name)
	}
	m, err := epmodel.Read(ctx, filepath.Base(path), graph)
	if err != nil {
		return cas.Digest{}, modelError(j.request, err)
	}
	j.locations = m.Locations()
	beside := func(location string) string { return filepath.Join(j.modelFolder(), filepath.FromSlash(location)) }
	for _, location := range j.locations {
		f := j.request.External[location]
		if f == nil {
			return cas.Digest{}, j.changed()
		}
		if err := copyPrivate(f, beside(location)); err != nil {
			return cas.Digest{}, storeError(err, j.request.Name)
		}
	}
	d, err := epmodel.Digest(ctx, m, graph, func(location string) (epmodel.Source, error) { return source(beside(location)) }, sumOf)
	if err != nil {
		return cas.Digest{}, modelError(j.request, err)
	}
	return cas.Digest(d), nil
}

// check validates the output and loads it in a process of its own, and writes the build's record.
func (j *job) check(ctx context.Context, out string, result compilers.Result) (*index.Build, error) {
	m, err := readArtefact(ctx, out, result)
	if err != nil {
		return nil, fail(CompileFailed, err, "model %q: the execution provider's output is not an artefact", j.request.Name)
	}
	b := j.record(m, result)
	checked, err := j.c.compiler.Check(ctx, compilers.CheckJob{
		Runtime: j.rc.spec, EPs: j.plan.eps, Graph: filepath.Join(out, result.Graph),
		SessionOptions: j.request.SessionOptions, FreeDimensions: j.request.FreeDimensions,
		FreeDimensionsByDenotation: j.request.FreeDimensionsByDenotation,
		GraphOptimizationLevel:     loadLevel(j.plan.canonical.GraphOptimizationLevel),
		Idle:                       j.urgent,
	})
	j.spent(checked.CPUSeconds)
	if err != nil {
		return nil, workerError(err, "model %q: load check", j.request.Name)
	}
	b.LoadCheck = checked.Outcome
	switch {
	case checked.Outcome == compilers.Failed:
		return nil, fail(CompileFailed, nil, "model %q compiles, but what comes out does not load: %s", j.request.Name, checked.Text).
			fact("code", fmt.Sprint(checked.Code))
	case checked.GraphOptimizationLevel == "disable_all":
		b.GraphOptimizationLevel = "disable_all"
	}
	if checked.Outcome == compilers.Passed {
		j.load = checked.Seconds
	}
	return b, nil
}

// loadLevel is the level at which applications load the graph unless they are told another: a session's default,
// except for those that asked to have nothing optimised.
func loadLevel(compiledAt string) string {
	if compiledAt == "disable_all" {
		return compiledAt
	}
	return "all"
}

// record is the build's record but for its files' digests.
func (j *job) record(m *epmodel.Model, result compilers.Result) *index.Build {
	r := j.request
	b := &index.Build{
		RequestKey: j.plan.requestKey, BuildKey: j.plan.buildKey, Scope: j.scope, UID: r.Peer.UID,
		ModelDigest: j.plan.canonical.Model, ModelName: r.Name, Record: j.plan.record, RecordJSON: j.plan.recordJSON,
		EPs: j.plan.facts, ORTVersion: result.ORTVersion, Route: j.plan.canonical.Route, Graph: result.Graph,
		ProviderOptions: make(map[string]map[string]string), SessionOptions: r.SessionOptions,
		CompileSeconds: result.Seconds, Created: j.c.now(), IRVersion: m.IRVersion, Embed: r.Embed,
	}
	for _, name := range result.Files {
		b.Files = append(b.Files, index.File{Name: name})
	}
	for _, ep := range j.plan.eps {
		info, _ := compilers.EPByName(ep.Name)
		b.ProviderOptions[ep.Name] = baseNames(info, ep.Options)
	}
	made := make(map[string]bool)
	for _, n := range m.Contexts {
		made[n.Source] = true
	}
	for _, ep := range j.plan.eps {
		if !made[ep.Name] {
			b.Warnings = append(b.Warnings, fmt.Sprintf("%s took no node of this model", ep.Name))
		}
	}
	if rest := m.Nodes - len(m.Contexts); rest > 0 {
		b.Warnings = append(b.Warnings, fmt.Sprintf("%d nodes stay outside the compiled parts and run on another execution provider: %s", rest, m.NodeSummary(8)))
	}
	return b
}

// store puts the files and then the manifest: from there on the build is acknowledged.
func (j *job) store(ctx context.Context, b *index.Build, out string) (*compiled, error) {
	c := j.c
	c.publishing.RLock()
	b.Source = j.keepSource(ctx)
	err := c.put(ctx, b, out)
	c.publishing.RUnlock()
	if err != nil {
		// Not kept is no reason not to serve what is compiled and checked: the application waits for it.
		c.log.Error("build not stored", "model", b.ModelName, "error", err)
		b.Warnings = append(b.Warnings, "not kept: "+err.Error())
		return c.keepAlone(b, out)
	}
	c.log.Info("compiled", "model", b.ModelName, "build", b.BuildKey.String(), "seconds", b.CompileSeconds, "scope", b.Scope)
	c.seen(j.request.Peer, b) // before the event, or a subscriber who asked for the build would not hear of it
	if j.anew == "" {
		c.happened(eventOf(b, EventCompiled, "by %s in %.2f s", makers(b), b.CompileSeconds))
	} else {
		c.index.Count("rebuilds", 1)
		c.happened(eventOf(b, EventRebuilt, "by %s in %.2f s: %s", makers(b), b.CompileSeconds, j.anew))
	}
	c.rebuilds.made(b)
	c.supersede(ctx, b)
	c.gains.after(j, b)
	return &compiled{build: b}, nil
}

func (c *Cache) put(ctx context.Context, b *index.Build, out string) error {
	for i := range b.Files {
		f := &b.Files[i]
		path := filepath.Join(out, filepath.FromSlash(f.Name))
		var err error
		if f.Digest, f.Size, err = c.cas.Adopt(ctx, path); err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	id, err := hex.DecodeString(newID() + newID())
	if err != nil {
		return err
	}
	copy(b.ID[:], id)
	return c.index.Publish(ctx, *b)
}

// supersede retracts the earlier builds of the same key: a newer one answers in their place. One that was made with
// another driver stays, for when that comes back, unless it is not served anyway.
func (c *Cache) supersede(ctx context.Context, b *index.Build) {
	builds, err := c.index.Lookup(b.RequestKey, b.Scope)
	if err != nil {
		c.log.Warn("superseded builds not found", "error", err)
		return
	}
	for i := range builds {
		old := &builds[i]
		if served := c.index.StateOf(old.ID).Name == index.Current; old.BuildKey == b.BuildKey && old.ID != b.ID && (!served || sameDrivers(old.EPs, b.EPs)) {
			if c.index.StateOf(old.ID).Name == index.Damaged {
				c.happened(eventOf(b, EventHealed, "in place of the build of %s", old.Created.Format(time.RFC3339)))
			}
			if _, err := c.retract(ctx, old, "compiled anew", pathGrace); err != nil {
				c.log.Warn("superseded build not removed", "build", old.ID.String(), "error", err)
			}
		}
	}
}

// keepAlone makes a view that only those who wait for it now will hold; nothing of it is kept.
func (c *Cache) keepAlone(b *index.Build, out string) (*compiled, error) {
	v, err := c.newView("unkept", b.Graph)
	if err != nil {
		return nil, storeError(err, b.ModelName)
	}
	for i := range b.Files {
		if err := c.moveFile(v, &b.Files[i], out); err != nil {
			c.discardView(v)
			return nil, storeError(err, b.ModelName)
		}
		v.files = append(v.files, viewFile{name: b.Files[i].Name, copied: true})
	}
	if err := c.sealView(v); err != nil {
		return nil, storeError(err, b.ModelName)
	}
	return &compiled{build: b, alone: v}, nil
}

// moveFile moves a staged file into the view, or links the blob that it has become already.
func (c *Cache) moveFile(v *view, f *index.File, out string) error {
	if !f.Digest.IsZero() {
		_, err := c.linkFile(context.Background(), v, *f)
		return err
	}
	to := filepath.Join(v.path, v.id, filepath.FromSlash(f.Name))
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return err
	}
	from := filepath.Join(out, filepath.FromSlash(f.Name))
	info, err := os.Lstat(from)
	if err != nil {
		return err
	}
	f.Size = info.Size()
	return errors.Join(os.Chmod(from, 0o444), os.Rename(from, to))
}

// makers names what made a build.
func makers(b *index.Build) string {
	names := make([]string, len(b.EPs))
	for i, ep := range b.EPs {
		names[i] = strings.TrimSpace(ep.Name + " " + ep.Version)
		if ep.SDKVersion != "" {
			names[i] += " (SDK " + ep.SDKVersion + ")"
		}
	}
	return strings.Join(names, ", ")
}

func epNames(eps []EP) string {
	names := make([]string, len(eps))
	for i, ep := range eps {
		names[i] = ep.Name
	}
	return strings.Join(names, ", ")
}

// workerError gives a worker's failure its class, with the compiler's own last words in the text.
func workerError(err error, format string, args ...any) error {
	var known *Error
	var refused *compilers.RefusedError
	var exit *compilers.ExitError
	var none *compilers.NoNodesError
	switch {
	case errors.As(err, &known):
		return err
	case errors.Is(err, errMoving):
		return fail(Busy, err, format, args...).hint("ask again when the update is done")
	case errors.Is(err, errReplaced):
		return fail(Unavailable, err, format, args...).hint("restart the application")
	case errors.As(err, &none):
		return fail(CompileFailed, err, format, args...).fact("reason", "no node taken").
			hint("load the model without epcached, or choose another execution provider")
	case errors.As(err, &refused):
		return fail(CompileFailed, err, format, args...).fact("code", fmt.Sprint(refused.Code))
	case errors.As(err, &exit):
		return fail(CompileFailed, err, format, args...).fact("exit", fmt.Sprint(exit.Code)).fact("signal", exit.Signal).
			fact("stderr", exit.Stderr)
	case errors.Is(err, compilers.ErrTimeout), errors.Is(err, compilers.ErrCPU), errors.Is(err, compilers.ErrMemory), errors.Is(err, compilers.ErrOutput):
		return fail(CompileFailed, err, format, args...).fact("reason", limitName(err)).
			hint("[limits] in the daemon's configuration sets the bounds of a compile")
	case errors.Is(err, context.Canceled):
		return fail(Cancelled, err, format, args...)
	case errors.Is(err, context.DeadlineExceeded):
		return fail(Deadline, err, format, args...)
	case errors.Is(err, compilers.ErrOption):
		return fail(BadRequest, err, format, args...)
	case errors.Is(err, compilers.ErrNotFound):
		return fail(Unavailable, err, format, args...)
	}
	return fail(CompileFailed, err, format, args...)
}

// limitName names the limit that a worker reached.
func limitName(err error) string {
	for _, limit := range []error{compilers.ErrTimeout, compilers.ErrCPU, compilers.ErrMemory, compilers.ErrOutput} {
		if errors.Is(err, limit) {
			return limit.Error()
		}
	}
	return ""
}

// storeError is for what goes wrong with the daemon's own files.
func storeError(err error, model string) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fail(NoSpace, err, "model %q", model)
	}
	return fail(Internal, err, "model %q", model)
}
