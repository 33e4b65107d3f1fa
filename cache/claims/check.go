package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/loadcheck"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// maxInterface bounds the size of a model's interface, because a claim keeps it in memory.
const maxInterface = 2 << 20

// readInterface reads what a compiled form of the request's model must show as well.
func readInterface(ctx context.Context, r *request.Request) (*epmodel.Interface, error) {
	source, err := r.ModelFiles(0).Interface(ctx)
	if err == nil && source.Size > maxInterface {
		err = apierr.New(apierr.BadModel, nil, "model %q: it cannot be claimed, because its "+
			"inputs, outputs and metadata are too large", identity.Truncated(r.Name))
	}
	return source, err
}

// examinePut checks the copies in the directory, and writes the build's record.
func (cs *Claims) examinePut(ctx context.Context, cl *claim, put *Put, dir string,
	names []string) (*index.Build, error) {
	ort, err := cl.ortVersion(put)
	if err != nil {
		return nil, refusePut(cl, err)
	}
	result := compilers.Result{Graph: names[0], Files: names, ORTVersion: ort}
	models, used, err := build.ReadOutput(ctx, dir, result)
	if err == nil {
		err = refuseUnusedFiles(used, names)
	}
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, refusePut(cl, err)
	}
	m := models[0]
	if cl.adopts {
		if err := cl.unchanged(ctx, *m, filepath.Join(dir, names[0])); err != nil {
			return nil, err
		}
	}
	if err := cl.checkOptions(m); err != nil {
		return nil, refusePut(cl, err)
	}
	_, err = build.RestoreInterface(ctx, cl.source, filepath.Join(dir, names[0]))
	if errors.Is(err, epmodel.ErrDiffers) {
		return nil, refusePut(cl, err)
	} else if err != nil {
		return nil, request.StoreError(err, cl.Name)
	}
	facts, err := cl.makerFacts(ctx, m, put)
	switch {
	case runtimes.IsTransient(ctx, err):
		return nil, cmp.Or(ctx.Err(), cl.checkNotReplaced())
	case err != nil:
		return nil, refusePut(cl, err)
	}
	b := build.NewBuild(cl.Attempt, cl.scope, models, result, nil, cs.Now())
	b.EPs, b.Put = facts, true
	if cl.adopts {
		b.BuildKey = identity.BuildKey(b.RequestKey, facts, b.Route)
	}
	if err := cl.checkLibrariesUnchanged(); err != nil {
		return nil, refusePut(cl, err)
	}
	b.LoadCheck = compilers.NotCheckable
	if cl.Content != nil {
		job := cl.Plan.JudgeTarget("", cl.Content).CheckJob(filepath.Join(dir, names[0]),
			request.LoadLevel(cl.Plan.Canonical.GraphOptimizationLevel))
		return b, cs.loadStaged(ctx, cl, b, job)
	}
	return b, nil
}

// unchanged refuses the copy of an adopted artefact if its bytes differ from those that the request
// was identified by, because the copy would be served under their digest.
func (cl *claim) unchanged(ctx context.Context, m epmodel.Model, path string) (err error) {
	m.External = nil
	if m.Whole, err = m.ArtefactFiles(); err != nil {
		return refusePut(cl, err)
	}
	got, err := (*identity.Sums)(nil).DigestAt(ctx, &m, path)
	switch {
	case err != nil:
		return cl.Request.ModelFiles(0).ModelError(err)
	case got != cl.Plan.Canonical.Model:
		return cl.Request.ModelFiles(0).ChangedError(nil)
	}
	return nil
}

// ortVersion returns the version of ONNX Runtime that made the artefact. It is part of the build
// key if the daemon does not have the libraries.
func (cl *claim) ortVersion(put *Put) (string, error) {
	if cl.adopts {
		return "", nil // a compiled model does not state it
	}
	stated := cl.Runtime.ORTVersion
	if cl.Content != nil {
		stated = cmp.Or(stated, cl.Content.Spec.ORTVersion)
	}
	said := cmp.Or(put.ORTVersion, stated)
	if len(said) > request.MaxVersion || cleanText(said) != said || cl.Plan.Outside &&
		said != stated {
		return "", fmt.Errorf("it was compiled with ONNX Runtime %.40q, and the claim is for %.40q",
			said, stated)
	}
	if cl.Content != nil && cl.NeedsOtherORT(said) {
		return "", fmt.Errorf("strict_ort: it was compiled with ONNX Runtime %.40q, and the "+
			"claim is for builds of %.40q", said, cl.Content.Spec.ORTVersion)
	}
	return said, nil
}

// refusePut refuses the artefact that was put.
func refusePut(cl *claim, err error) error {
	said := "the submitted files are not a compiled form of it"
	if cl.adopts {
		said = "the build does not fit this request"
	}
	e := apierr.New(apierr.BadRequest, err, "model %q: %s", cl.Name, said)
	if format, is := errors.AsType[*epmodel.FormatError](err); is {
		e.WithFact("file", format.File).WithFact("field", format.Field).
			WithFact("offset", fmt.Sprint(format.Offset))
	}
	return e
}

// refuseUnusedFiles refuses files that nothing in the artefact refers to.
func refuseUnusedFiles(used map[string]bool, names []string) error {
	for _, name := range names[1:] {
		if !used[name] {
			return fmt.Errorf("no node refers to file %q", name)
		}
	}
	if used[names[0]] {
		return fmt.Errorf("the graph %q is named as one of its own context binaries", names[0])
	}
	return nil
}

func (cl *claim) checkOptions(m *epmodel.Model) error {
	for i := range m.Contexts {
		n := &m.Contexts[i]
		if !slices.ContainsFunc(cl.EPs, func(ep identity.EP) bool { return ep.Name == n.Source }) {
			return fmt.Errorf("node %q is of execution provider %q, and the request is for %s",
				n.Node, n.Source, request.EPNames(cl.EPs))
		}
		if embedded := n.EmbedMode == 1; n.MainContext == 1 && embedded != cl.Embed {
			return fmt.Errorf("node %q: embed_mode %d differs from the "+
				"request", n.Node, n.EmbedMode)
		}
	}
	return cmp.Or(build.CheckComplete(&cl.Plan.Canonical, m),
		build.SuitsOutput(cl.Plan.Canonical.Output, m))
}

// makerFacts returns the facts about SDK and hardware that the artefact states itself. If the
// daemon has the libraries as well, both must match theirs.
func (cl *claim) makerFacts(ctx context.Context, m *epmodel.Model,
	put *Put) ([]index.EPFacts, error) {
	facts := slices.Clone(cl.Plan.Facts)
	for i := range facts {
		f := &facts[i]
		stated, took, err := compilers.ReadStated(f.Name, cl.adopts ||
			cl.Plan.WritesCompatibility(i), m)
		if err != nil {
			return nil, err
		}
		if len(stated.CompatibilityString) > maxClaimText {
			return nil, fmt.Errorf("its compatibility string is too long: %d "+
				"bytes", len(stated.CompatibilityString))
		}
		request.SetStatedFacts(f, stated, took)
		if cl.Plan.Outside && i < len(put.MadeBy) && put.MadeBy[i].EP == f.Name {
			version := put.MadeBy[i].Version
			f.Version = shownText(version[:min(len(version), request.MaxVersion)])
		}
		if cl.adopts { // without the facts that the graph does not state itself
			*f = index.EPFacts{Name: f.Name, Devices: f.Devices, SDKVersion: f.SDKVersion,
				HardwareArchitecture: f.HardwareArchitecture,
				CompatibilityString:  f.CompatibilityString, TookNone: f.TookNone}
		}
		if cl.Plan.Outside || cl.adopts || !took {
			continue
		}
		if err := cl.checkStatedFacts(ctx, facts, i); err != nil {
			return nil, err
		}
	}
	return facts, nil
}

// checkStatedFacts compares what an execution provider states in the artefact with the libraries
// that the claim is for. A compatibility string also depends on options and the model, so a
// different one is not refused but judged by the execution provider.
func (cl *claim) checkStatedFacts(ctx context.Context, facts []index.EPFacts, i int) error {
	f, mark := &facts[i], &cl.Plan.Marks[i]
	j := judge.Judgement{Verdict: compilers.Unsupported}
	if f.SDKVersion == mark.SDKVersion && f.HardwareArchitecture == mark.HardwareArchitecture {
		var err error
		a := cl.Plan.JudgeTarget("", cl.Content)
		if j, err = cl.claims.LoadChecker.Judges.GlancePart(ctx, a.Target(), i,
			judge.Part{Made: f}); err != nil {
			return err
		}
	}
	if j.Verdict == compilers.Optimal || j.Verdict == compilers.Unknown {
		return nil
	}
	return fmt.Errorf("%s compiled it with SDK %q for %q (%s); the claim is for libraries of "+
		"SDK %q, %q (%s)", f.Name, f.SDKVersion, f.HardwareArchitecture,
		judge.ShortCompatibility(f.CompatibilityString), mark.SDKVersion, mark.HardwareArchitecture,
		judge.ShortCompatibility(mark.CompatibilityString))
}

// loadStaged loads an artefact that is not stored yet, in a worker, as applications will. It also
// runs the artefact if it may come from another machine.
func (cs *Claims) loadStaged(ctx context.Context, cl *claim, b *index.Build,
	job compilers.CheckJob) error {
	leave, err := cs.Workspaces.AcquireSlot(ctx, cl.Request)
	if err != nil {
		return err
	}
	defer leave()
	a := cl.Plan.JudgeTarget("", cl.Content)
	if a.Marks.OtherMachine(b) {
		job.Zeros = loadcheck.FreeSizes[0]
	}
	checked, err := cs.LoadChecker.Check(ctx, a, job)
	if err == nil && job.Zeros > 0 && checked.Outcome != compilers.Passed {
		// Without the model a failure on zero inputs cannot be told from a broken artefact, so it
		// is loaded here without running, and run again before it is served.
		job.Zeros = 0
		checked, err = cs.LoadChecker.Check(ctx, a, job)
	}
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case !cl.Content.IsCurrent():
		return cl.checkNotReplaced()
	case err != nil:
		return request.WorkerError(err, "model %q: load check", b.ModelName)
	case checked.Outcome == compilers.Failed:
		return apierr.New(apierr.CompileFailed, nil, "model %q: %s: %s", b.ModelName,
			notLoadedText(cl), checked.Text).WithFact("code", fmt.Sprint(checked.Code))
	case checked.GraphOptimizationLevel == "disable_all":
		b.GraphOptimizationLevel = "disable_all"
	}
	b.LoadCheck = checked.Recorded()
	for i := range b.EPs {
		if checked.Ran && !b.EPs[i].TookNone && b.EPs[i].HardwareArchitecture == "" {
			b.EPs[i].HardwareArchitecture = a.Marks[i].MachineClass
		}
	}
	return nil
}

// checkNotReplaced refuses a put if the libraries that it is for were replaced.
func (cl *claim) checkNotReplaced() error {
	return apierr.New(apierr.Unavailable, runtimes.ErrFilesChanging,
		"model %q: the runtime's libraries changed since the claim was granted", cl.Name).
		WithHint("request the model again")
}

func notLoadedText(cl *claim) string {
	if cl.adopts {
		return "it does not load"
	}
	return "the submitted build does not load"
}
