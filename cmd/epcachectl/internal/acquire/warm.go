package acquire

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/internal/config"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// modelAsk is a request for a model, or for several as a group.
type modelAsk struct {
	call   *Get
	models []string
}

func (k modelAsk) acquire(ctx context.Context, c *unixsock.Client, onMiss wire.OnMiss,
	show *term.Phases) modelResult {
	return k.call.acquireModels(ctx, c, k.models, onMiss, show)
}

// warmPlan is a checked call of warm.
type warmPlan struct {
	call     *Get
	models   []string // of the arguments
	pipeline *config.Pipeline
	onMiss   wire.OnMiss
}

// warming checks the call and reads its pipeline file.
func (g *Get) warming(args []string, file string) (*warmPlan, error) {
	if len(args) == 0 && file == "" {
		return nil, exit.Usage(exit.Hint(errors.New("warm: no model"),
			"epcachectl warm MODEL --ep EP, or epcachectl warm --pipeline FILE"))
	}
	w := &warmPlan{call: g, pipeline: &config.Pipeline{}}
	var err error
	if file != "" {
		if w.pipeline, err = config.LoadPipeline(file); err != nil {
			return nil, exit.Usage(err)
		}
	}
	if w.onMiss, err = g.check(append(slices.Clone(args), file)); err != nil {
		return nil, err
	}
	if w.models, err = modelsBelow(args); err != nil {
		return nil, err
	}
	w.models = slices.DeleteFunc(w.models, w.lists)
	if w.needsEP() != "" {
		return w, nil
	}
	if o := append(g.Request.optionsBeforeEP, g.Request.optionsWithEP...); len(g.Request.EPs) ==
		0 && len(o) > 0 {
		return nil, exit.Usagef("--option %s: there is no --ep; in %s each model names its own",
			term.Brief(o[0].key), file)
	}
	_, err = w.requests() // reports errors in the file before the daemon is asked
	return w, err
}

// needsEP returns the first model for which neither a flag nor the file names an execution
// provider, or "".
func (w *warmPlan) needsEP() string {
	if len(w.call.Request.EPs) > 0 {
		return ""
	}
	if len(w.models) > 0 {
		return w.models[0]
	}
	unnamed := func(r config.PipelineRequest) bool { return len(r.EPs) == 0 }
	if i := slices.IndexFunc(w.pipeline.Requests, unnamed); i >= 0 {
		return w.pipeline.Requests[i].Models[0]
	}
	return ""
}

func (w *warmPlan) lists(path string) bool {
	abs, err := filepath.Abs(path)
	has := func(r config.PipelineRequest) bool { return slices.Contains(r.Models, abs) }
	return err == nil && slices.ContainsFunc(w.pipeline.Requests, has)
}

// requests returns the requests of the call. Flags apply where the file sets no value.
func (w *warmPlan) requests() ([]modelAsk, error) {
	asks := w.call.asksFor(w.models)
	var wrong config.Errors
	for i := range w.pipeline.Requests {
		r := &w.pipeline.Requests[i]
		one := *w.call
		if err := one.Request.withFile(r); err != nil {
			wrong = append(wrong, err)
		}
		asks = append(asks, modelAsk{&one, r.Models})
	}
	if len(wrong) > 0 {
		return nil, exit.Usage(wrong)
	}
	return asks, nil
}

func (g *Get) asksFor(models []string) []modelAsk {
	asks := make([]modelAsk, len(models))
	for i, path := range models {
		asks[i] = modelAsk{g, []string{path}}
	}
	return asks
}

func acquireEach(ctx context.Context, c *unixsock.Client, asks []modelAsk, onMiss wire.OnMiss,
	show *term.Phases) []modelResult {
	results := make([]modelResult, len(asks))
	inParallel(len(asks), func(i int) { results[i] = asks[i].acquire(ctx, c, onMiss, show) })
	return results
}

// inParallel calls do for 0 to n-1, some at a time, in this order.
func inParallel(n int, do func(int)) {
	var all errgroup.Group
	all.SetLimit(parallelRequests)
	for i := range n {
		all.Go(func() error {
			do(i)
			return nil
		})
	}
	_ = all.Wait() // none fails
}

// eachModel splits the results of groups into one for each model.
func eachModel(asks []modelAsk, results []modelResult) []modelResult {
	var out []modelResult
	for i, k := range asks {
		if len(k.models) == 1 {
			out = append(out, results[i])
			continue
		}
		out = append(out, eachOfGroup(results[i], k.models)...)
	}
	return out
}

// withFile applies a pipeline file's values to a copy of the flags' request.
func (r *Request) withFile(file *config.PipelineRequest) *config.Error {
	flags := r.EPs
	r.EPs = nil
	if len(file.EPs) == 0 {
		for _, ep := range flags {
			r.EPs = append(r.EPs, proto.CloneOf(ep))
		}
	}
	for i, ep := range file.EPs {
		if err := r.AddEP(ep); err != nil {
			return file.ErrorAt(err, "ep", strconv.Itoa(i))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(file.Options)) {
		if err := r.replaceOption(key, file.Options[key]); err != nil {
			return file.ErrorAt(err, "options", key)
		}
	}
	if len(file.Models) > 1 && r.embed {
		return file.ErrorAt(errors.New("--embed cannot be used for a group, whose models share "+
			"a file"), "models")
	}
	r.sessionOptions = merged(r.sessionOptions, file.SessionOptions)
	r.dims = merged(r.dims, file.Dims)
	r.Denotations = merged(r.Denotations, file.Denotations)
	r.embed = r.embed || file.Embed
	r.level = cmp.Or(file.Level, r.level)
	return nil
}

// replaceOption sets an option of the only execution provider, or of the one in EP/KEY.
func (r *Request) replaceOption(key, value string) error {
	name, option, named := strings.Cut(key, "/")
	switch {
	case !named && len(r.EPs) > 1:
		return fmt.Errorf("there are %d execution providers: write %q", len(r.EPs),
			r.EPs[0].GetName()+"/"+key)
	case !named:
		name, option = r.EPs[0].GetName(), key
	}
	for _, ep := range r.EPs {
		if ep.GetName() == name {
			ep.Options = merged(ep.Options, map[string]string{option: value})
			return nil
		}
	}
	return fmt.Errorf("unknown execution provider %q", term.Brief(name))
}

func merged[V any](below, over map[string]V) map[string]V {
	out := make(map[string]V, len(below)+len(over))
	maps.Copy(out, below)
	maps.Copy(out, over)
	return out
}

// maxAsks bounds how often warm requests a model again because its job is unknown when it follows
// it.
const maxAsks = 3

// Warm requests compiles of the models in the arguments and in a pipeline file, and with follow
// waits for them.
func (g *Get) Warm(ctx context.Context, args []string, file string, follow bool) error {
	w, err := g.warming(args, file)
	if err != nil {
		return err
	}
	return g.WithDaemon(ctx, func(ctx context.Context, c *unixsock.Client) error {
		if path := w.needsEP(); path != "" {
			switch err := g.Request.OnlyEP(ctx, c, g.Print); {
			case err != nil && file != "":
				return exit.WithOperation("warm", path, err) // the others have one in the file
			case err != nil:
				return exit.WithVerb("warm", err)
			}
		}
		asks, err := w.requests()
		if err != nil {
			return err
		}
		follow = follow && !g.DryRun
		show := term.NewPhases(g.Print, g.Progress || follow && !g.Print.Terminal &&
			!g.JSON, len(asks))
		show.Waits = follow
		results := acquireEach(ctx, c, asks, w.onMiss, show)
		closeViews(results)
		requestAgain(ctx, c, asks, results, w.onMiss, show)
		if follow { // in order, some at a time, because the jobs run in the order of the requests
			inParallel(len(results), func(i int) {
				r := &results[i]
				if r.err == nil && r.reply.GetJob() != "" {
					asks[i].follow(ctx, c, r, show)
				}
				show.Done(r.path, false)
			})
		}
		show.End()
		return g.report(eachModel(asks, results))
	})
}

// modelsBelow replaces directories by the models in them. It skips compiled models, hidden
// directories, which belong to other programs, and stores, whose models are copies.
func modelsBelow(args []string) ([]string, error) {
	var models []string
	for _, arg := range args {
		info, err := os.Stat(arg)
		if err != nil || !info.IsDir() {
			models = append(models, arg) // opening it reports errors
			continue
		}
		before := len(models)
		err = filepath.WalkDir(arg, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() && path != arg &&
				(strings.HasPrefix(entry.Name(), ".") || isStore(path)) {
				return fs.SkipDir
			}
			if err == nil && !entry.IsDir() && strings.HasSuffix(path, ".onnx") &&
				!strings.HasSuffix(path, "_ctx.onnx") {
				models = append(models, path)
			}
			return err
		})
		if err != nil {
			return nil, exit.WithOperation("warm", arg, modelfile.PlainPathError(err))
		}
		if len(models) == before {
			return nil, exit.WithOperation("warm", arg, exit.Hint(exit.Missing("no model in it: "+
				"no *.onnx file other than *_ctx.onnx"), "if the models have other names, name "+
				"them one by one"))
		}
	}
	return models, nil
}

func isStore(dir string) bool {
	missing := func(name string) bool {
		_, err := os.Lstat(filepath.Join(dir, name))
		return err != nil
	}
	return !slices.ContainsFunc([]string{"CACHEDIR.TAG", "manifests", "objects"}, missing)
}

// requestAgain requests again the models that the daemon refused as busy, each time after a compile
// of an earlier request ended.
func requestAgain(ctx context.Context, c *unixsock.Client, asks []modelAsk, results []modelResult,
	onMiss wire.OnMiss, show *term.Phases) {
	var jobs []*modelResult // jobs that may be under way, in order
	for i := range results {
		if results[i].reply.GetJob() != "" {
			jobs = append(jobs, &results[i])
		}
	}
	for i := range results {
		r := &results[i]
		// without jobs of its own, other requests use the slots
		for errors.Is(r.err, unixsock.ErrBusy) && len(jobs) > 0 {
			before := jobs[0]
			jobs = jobs[1:]
			// The job's own followers report its result, so ignore it here.
			_, _ = before.clientFor(c).Follow(ctx, &wire.Follow{Job: before.reply.GetJob()},
				func(p *wire.Progress) { show.Phase(before.path, p) })
			show.Done(before.path, false)
			*r = asks[i].acquire(ctx, c, onMiss, show)
			closeViews([]modelResult{*r})
			if r.reply.GetJob() != "" {
				jobs = append(jobs, r)
			}
		}
	}
}

// follow waits for one job. If the job is unknown by now, it requests the model again.
func (k modelAsk) follow(ctx context.Context, c *unixsock.Client, r *modelResult,
	show *term.Phases) {
	for range maxAsks {
		job, err := r.clientFor(c).Follow(ctx, &wire.Follow{Job: r.reply.GetJob()},
			func(p *wire.Progress) { show.Phase(r.path, p) })
		if err == nil {
			r.job = job
			if failed := JobError(job); failed != nil {
				r.err = exit.WithOperation("compile", r.path, failed)
			}
			return
		}
		if !errors.Is(err, unixsock.ErrNotFound) {
			r.err = exit.TimeoutError(ctx, exit.WithOperation("follow", r.path, err),
				k.call.Timeout, func() (string, string) {
					return "", "the compile continues; to wait for it: epcachectl jobs follow " +
						"" + term.Printable(term.Short(r.reply.GetJob()))
				})
			return
		}
		*r = k.acquire(ctx, c, wire.OnMiss_BACKGROUND, show)
		closeViews([]modelResult{*r})
		if r.err != nil || r.reply.GetJob() == "" {
			return
		}
	}
	r.err = exit.WithOperation("follow", r.path, errors.New("its job ended several times "+
		"without a result; see epcachectl jobs"))
}
