// Package acquire requests builds of models, from the daemon or from a store without one, and uses
// them as get and warm say: prints, copies, or runs a program with them. If the daemon grants a
// claim, claim.go compiles.
package acquire

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cache/readonly"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/program"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// parallelRequests is how many models a call requests at the same time; the others wait.
const parallelRequests = 8

// Get is one call of get, or of a similar verb.
type Get struct {
	*cli.Call
	Verb      string // empty: get
	Request   Request
	OnMiss    string
	out       string
	force     bool
	DryRun    bool
	Progress  bool
	keepGoing bool
	share     bool
	adopt     bool
	orPlain   bool      // without a build the program runs with the source model
	Program   []string  // behind "--", empty: none
	claimant  *claimant // compiles under claims; nil until there is one; guarded by once
	// state is the state directory of a store to read without a daemon; "": ask the daemon.
	state string
	build string // with state: prefix of the build key
	// unpackDir is, with state, the directory for unpacked builds; "": the user's cache directory.
	unpackDir string
	stored    *readonly.Store // with state: the store
}

func (g *Get) copies() bool { return g.out != "" && len(g.Program) == 0 }
func (g *Get) name() string { return cmp.Or(g.Verb, "get") }

// AddFlags adds the flags of get.
func (g *Get) AddFlags(cmd *cobra.Command) {
	g.Request.AddFlags(cmd)
	f := cmd.Flags()
	f.StringVar(&g.OnMiss, "on-miss", "wait", "what a miss does, an `ACTION`: wait, "+
		"background, claim, fail, fetch, refresh or bypass")
	f.BoolVar(&g.keepGoing, "keep-going", false, "finish the compile even if this call is "+
		"interrupted")
	f.StringVar(&g.out, "out", "", "write a copy of each model's files into `DIR`")
	f.BoolVarP(&g.force, "force", "f", false, "replace files in --out that differ")
	f.BoolVarP(&g.DryRun, "dry-run", "n", false,
		"compile and write nothing, print what would be done")
	f.BoolVar(&g.Progress, "progress", false,
		"print each phase on a line of its own to standard error")
	f.StringVar(&g.state, "state", "",
		"read the store in `DIR` without a daemon, and write nothing")
	f.StringVar(&g.build, "build", "", "with --state: only the build with this `KEY` prefix")
	f.StringVar(&g.unpackDir, "unpack-to", "",
		"with --state: unpack packed builds to `DIR`, which must be private to this user")
	f.BoolVar(&g.share, "share", false,
		"compile the models as one weight-sharing group, in this order")
	f.BoolVar(&g.orPlain, "or-plain", false,
		"without a build, run the program with the source model")
	f.BoolVar(&g.adopt, "adopt", false, "store models that are compiled already, with their files")
}

// checkProgram checks the flags about the program and its ONNX Runtime.
func (g *Get) checkProgram() error {
	version := g.Request.ortVersion
	return cmp.Or(
		usageMistake(g.orPlain && len(g.Program) == 0, "--or-plain needs a program",
			"epcachectl get MODEL --ep EP --or-plain -- PROGRAM {}"),
		usageMistake(version != "" && !ortVersion.MatchString(version), "--ort-version "+
			term.Brief(version)+" is not a version", "such as 1.31.1; in Python: "+
			"onnxruntime.__version__"),
	)
}

var ortVersion = regexp.MustCompile(`^[0-9]+(\.[0-9]+)+$`)

// Run requests builds of the models, and uses them as the flags say.
func (g *Get) Run(ctx context.Context, models []string) (err error) {
	onMiss, err := g.check(models)
	if err != nil {
		return err
	}
	defer func() {
		if g.claimant != nil {
			err = errors.Join(err, g.claimant.worker.Close())
		}
	}()
	if g.OnMiss == "claim" {
		if _, err := g.claiming(); err != nil {
			return err
		}
	}
	if g.state != "" {
		return g.WithTimeout(ctx, func(ctx context.Context) error {
			if err := g.openStore(ctx); err != nil {
				return err
			}
			return g.acquireAndUse(ctx, nil, models, onMiss)
		})
	}
	used := false
	err = g.WithDaemon(ctx, func(ctx context.Context, c *unixsock.Client) error {
		if err := g.Request.OnlyEP(ctx, c, g.Print); err != nil {
			return exit.WithVerb("get", err)
		}
		used = true
		return g.acquireAndUse(ctx, c, models, onMiss)
	})
	if err == nil || used || !g.orPlain || ctx.Err() != nil {
		return err
	}
	results := make([]modelResult, len(models)) // of a daemon that cannot be asked
	for i, path := range models {
		results[i] = modelResult{path: path, err: err}
	}
	return cmp.Or(g.report(results), g.replaceProcess(results))
}

// acquireAndUse requests all models, from the store if there is no client, and uses the results.
func (g *Get) acquireAndUse(ctx context.Context, c *unixsock.Client, models []string,
	onMiss wire.OnMiss) error {
	asks := g.asksFor(models)
	if g.share {
		asks = []modelAsk{{g, models}}
	}
	show := term.NewPhases(g.Print, g.Progress, len(asks))
	results := eachModel(asks, acquireEach(ctx, c, asks, onMiss, show))
	show.End()
	defer closeViews(results)
	g.orPlain = g.orPlain && !errors.Is(ctx.Err(), context.Canceled) // interrupted
	err := g.report(results)
	if err == nil && g.out != "" {
		err = g.copyOut(ctx, results)
	}
	if err == nil && len(g.Program) > 0 && !g.DryRun {
		err = g.replaceProcess(results)
	}
	return err
}

func usageMistake(made bool, text, hint string) error {
	if !made {
		return nil
	}
	return exit.Hint(exit.Usagef("get: %s", text), hint)
}

func (g *Get) check(models []string) (wire.OnMiss, error) {
	claims := g.OnMiss == "claim"
	complete := g.Request.CompleteOrEP
	if claims { // the daemon may not have those libraries
		complete = g.Request.Complete
	}
	err := cmp.Or(
		usageMistake(len(models) == 0, "no model", "epcachectl get MODEL --ep EP"),
		usageMistake(g.force && g.out == "", "--force needs --out: only files there are replaced",
			""),
		usageMistake(g.share && len(models) < 2, "--share: a group has two models or more",
			"epcachectl get --share MODEL MODEL... --ep EP"),
		usageMistake(g.share && g.Request.embed,
			"--share and --embed exclude each other: the models share a file", ""),
		usageMistake(len(g.Program) > 0 && g.JSON,
			"--json and a program exclude each other: both use standard output", ""),
		program.CheckPlaceholders(g.Program, len(models)),
		g.checkProgram(),
		complete(),
		g.checkStored(),
		usageMistake(g.adopt && (g.state != "" || g.share), "--adopt cannot be combined with "+
			"--state or --share", ""),
		usageMistake(claims && g.share, "--on-miss claim takes one model, and --share several", ""),
		usageMistake(claims && g.Request.Runtime == "", "--on-miss claim needs --runtime: it "+
			"compiles with your own libraries", "name their directory: --runtime DIR"),
		exit.OneOf("get: --on-miss", g.OnMiss, "wait", "background", "claim", "fail", "fetch",
			"refresh", "bypass"),
	)
	if g.DryRun {
		return wire.OnMiss_FAIL, err
	}
	return onMissNames[g.OnMiss], err
}

var onMissNames = map[string]wire.OnMiss{
	"wait": wire.OnMiss_WAIT, "fail": wire.OnMiss_FAIL, "refresh": wire.OnMiss_REFRESH,
	"bypass":     wire.OnMiss_BYPASS,
	"background": wire.OnMiss_BACKGROUND, "claim": wire.OnMiss_CLAIM, "fetch": wire.OnMiss_FETCH,
}

// acquireModels requests one model, or several as a group.
func (g *Get) acquireModels(ctx context.Context, c *unixsock.Client, paths []string,
	onMiss wire.OnMiss, show *term.Phases) modelResult {
	path := paths[0]
	result := modelResult{path: path, adopted: g.adopt}
	defer func() { show.Done(path, result.queued() || errors.Is(result.err, unixsock.ErrBusy)) }()
	models, failed, err := modelfile.OpenAll(paths)
	if err != nil {
		result.err = exit.WithOperation(g.name(), failed, err)
		return result
	}
	defer modelfile.CloseAll(models)
	message, files, err := g.Request.message(models[0])
	if err != nil {
		result.err = exit.WithOperation(g.name(), path, err)
		return result
	}
	defer closeExtra(files)
	for _, m := range models[1:] { // closed by closeModels
		message.Group = append(message.Group,
			&wire.Model{Fd: uint32(len(files)), Name: m.Name(), Path: m.Absolute()})
		files = append(files, m.File)
	}
	message.OnMiss, message.KeepGoing, message.Adopt = onMiss, g.keepGoing, g.adopt
	// With --json the view's path is printed for other processes; otherwise this process, or the
	// program that replaces it, keeps the view.
	message.HoldsView = !g.JSON
	start := time.Now()
	external := func(i int, location string) (*os.File, error) {
		return models[i].External(location)
	}
	var last atomic.Pointer[wire.Progress]
	var fetching atomic.Bool
	progress := func(p *wire.Progress) {
		last.Store(p)
		fetching.CompareAndSwap(false, p.GetPhase() == "fetching") // others may follow
		show.Phase(path, p)
	}
	if g.stored != nil {
		if err := g.find(ctx, message, files, external, progress, &result); err != nil {
			result.err = exit.WithOperation(g.name(), path, storedError(err))
		}
		result.elapsed = time.Since(start)
		return result
	}
	ask := func(c *unixsock.Client) error {
		message.OnMiss = onMiss
		result.reply, result.view, err = c.Acquire(ctx, message, files, external, progress)
		if g.mayClaim(err, onMiss, paths) {
			message.OnMiss = wire.OnMiss_CLAIM
			result.reply, result.view, err = c.Acquire(ctx, message, files, external, progress)
		}
		if err == nil && result.reply.GetClaim() != nil {
			cl, claimErr := g.claiming()
			if claimErr != nil {
				return errors.Join(claimErr, giveUp(ctx, c, result.reply.GetClaim(), claimErr))
			}
			err = cl.work(ctx, c, models[0], g, &result, progress)
		}
		return err
	}
	err = ask(c)
	if unixsock.ConnectionEnded(err) {
		err = g.Retry(ctx, ask)
	}
	if slices.Contains(alternatives(err), "own") {
		if own, ownErr := g.OwnDaemon(ctx); ownErr == nil {
			result.daemon, err = own, ask(own)
		}
	}
	result.elapsed = time.Since(start)
	result.graph = result.reply.GetGraph()
	result.fetched = fetching.Load()
	if err == nil && result.passedThrough() {
		err = checkReferences(ctx, path)
	}
	switch {
	case err == nil:
		result.missing = g.DryRun && g.compilesAnyway() && result.reply.GetOutcome() == "hit"
	// There is neither a build nor a remembered failure.
	case g.DryRun && errors.Is(err, unixsock.ErrNotFound) && g.OnMiss != "fail" &&
		(g.compilesAnyway() || !isRememberedFailure(err)):
		result.missing, result.startedAt = true, isUnderWay(err)
	default:
		result.err = exit.TimeoutError(ctx,
			exit.WithOperation(g.name(), path, g.withHint(err, paths)), g.Timeout,
			func() (string, string) { return g.fateText(last.Load()) })
	}
	return result
}

// mayClaim reports whether the daemon proposes a claim, and this call can use one: for one model,
// with --runtime. The user's own daemon is preferred if the daemon proposes that first.
func (g *Get) mayClaim(err error, onMiss wire.OnMiss, paths []string) bool {
	ways := alternatives(err)
	if len(ways) > 0 && ways[0] == "own" && g.DaemonProgram() != "" {
		return false
	}
	return slices.Contains(ways, "claim") && onMiss == wire.OnMiss_WAIT && len(paths) == 1
}

func (g *Get) compilesAnyway() bool { return g.OnMiss == "refresh" || g.OnMiss == "bypass" }

// Ask requests one model, or several as a group, without a compile.
func (g *Get) Ask(ctx context.Context, c *unixsock.Client, paths []string,
	onMiss wire.OnMiss) (*wire.AcquireReply, error) {
	show := term.NewPhases(g.Print, false, 1)
	result := g.acquireModels(ctx, c, paths, onMiss, show)
	show.End()
	closeViews([]modelResult{result})
	return result.reply, result.err
}

// sharedMu guards values that the models of a call share, which the first user makes.
var sharedMu sync.Mutex

func (g *Get) claiming() (*claimant, error) {
	sharedMu.Lock()
	defer sharedMu.Unlock()
	var err error
	if g.claimant == nil {
		g.claimant, err = newClaimant(&g.Request)
	}
	return g.claimant, err
}

// withHint replaces the daemon's hint, which is about the protocol, by one with this program's
// flags.
func (g *Get) withHint(err error, paths []string) error {
	e, is := errors.AsType[*unixsock.Error](err)
	if !is || !errors.Is(err, unixsock.ErrNotFound) || isRememberedFailure(err) {
		return err
	}
	plain := *e
	plain.Hint = ""
	hint := "compile it: epcachectl get "
	if isUnderWay(err) {
		hint = "wait for it: epcachectl get "
	}
	hint += g.Request.commandLine()
	if len(paths) > 1 {
		hint += "--share "
	}
	hint += strings.Join(term.Printables(paths), " ")
	if job := e.Facts["job"]; job != "" {
		hint += ", or epcachectl jobs follow " + term.Printable(term.Short(job))
	}
	return exit.Hint(&plain, hint)
}

// isUnderWay reports whether there is no build yet because it is being compiled.
func isUnderWay(err error) bool { return factOf(err, "phase") != "" }

// factOf returns a fact of the daemon's error, "" if it has none of that name.
func factOf(err error, name string) string {
	if e, is := errors.AsType[*unixsock.Error](err); is {
		return e.Facts[name]
	}
	return ""
}

// isRememberedFailure reports whether the daemon remembers that the model does not compile.
func isRememberedFailure(err error) bool { return factOf(err, "reason") != "" }

// report prints every model's result, and gives the exit code of the first that failed.
func (g *Get) report(results []modelResult) error {
	var failed error
	for _, r := range results {
		if r.reportedElsewhere() && (r.err == nil || failed != nil) {
			continue
		}
		if r.err != nil {
			if g.runsPlain(&r) {
				g.Print.Warning(fmt.Sprintf("%v; the program runs with the source model", r.err))
				continue
			}
			g.Print.Failure(r.err)
			failed = cmp.Or(failed, error(exit.Status(exit.Code(r.err))))
			continue
		}
		for _, warning := range r.reply.GetWarnings() {
			g.Print.Warning(fmt.Sprintf("%s %q: %s", g.name(), r.path, warning))
		}
		if !g.JSON && len(g.Program) == 0 {
			g.Print.Line("%s", r.line(g.DryRun))
			if g.state != "" && r.view != nil {
				g.Print.Line("  %s", term.Printable(filepath.Join(r.reply.GetView(),
					filepath.FromSlash(r.graph))))
			}
			for _, line := range r.groupLines() {
				g.Print.Line("%s", line)
			}
		}
	}
	if g.JSON {
		return errors.Join(failed, g.Print.JSON(objects(results, g.DryRun)))
	}
	return failed
}

// checkReferences fails if a file is missing that every session of a model needs.
func checkReferences(ctx context.Context, path string) error {
	m, err := modelfile.Open(path)
	if err != nil {
		return err
	}
	defer m.Close()
	names, err := m.References(ctx)
	for _, name := range names {
		if err == nil {
			_, err = m.ExternalSize(name)
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil // the daemon reports other mistakes better
}

// fateText says what happens to the compile when this request is cancelled. last is its latest
// progress.
func (g *Get) fateText(last *wire.Progress) (text, hint string) {
	if last.GetPhase() == "" {
		return "", ""
	}
	during := "(" + term.Printable(last.GetPhase()) + ")"
	if last.GetJob() == "" {
		return during, ""
	}
	follow := "epcachectl jobs follow " + term.Printable(term.Short(last.GetJob()))
	switch {
	case g.keepGoing:
		return during + ": the compile continues because of --keep-going", "wait for it: " + follow
	case last.GetWaiting() > 1:
		return during + ": the compile continues because other callers wait for it", "wait for " +
			"it: " + follow
	}
	return during + ": the compile is cancelled, unless another caller waits for " +
		"it", "--keep-going finishes it even then; --on-miss background does not wait"
}

// runsPlain reports whether the program runs with the source model, because there is no build yet,
// or none at all.
func (g *Get) runsPlain(r *modelResult) bool {
	if !g.orPlain || g.DryRun || r.err == nil && !r.queued() {
		return false
	}
	_, err := os.Stat(r.path)
	return err == nil
}

// replaceProcess executes the program in place of this process, so that it inherits the descriptor
// of the view, gets signals directly, and returns its own exit status. The lease lasts until it
// ends, because the descriptor is the lease.
func (g *Get) replaceProcess(results []modelResult) error {
	paths := make([]string, len(results))
	var views []*os.File
	for i := range results {
		graph, err := results[i].graphPath()
		if r := &results[i]; g.runsPlain(r) {
			graph, err = filepath.Abs(r.path)
		}
		if err != nil {
			return exit.WithOperation("get", results[i].path, err)
		}
		paths[i] = graph
		if results[i].view != nil && !results[i].reportedElsewhere() {
			views = append(views, results[i].view)
		}
	}
	path, err := program.Find(g.Program[0])
	if err != nil {
		return exit.WithOperation("run", g.Program[0], err)
	}
	argv := program.FillPlaceholders(g.Program, paths)
	g.Print.Clear()
	fits, err := program.SetResultVariable(objects(results, false))
	if err == nil && !fits {
		g.Print.Warning(fmt.Sprintf("run %q: %s is not set: it would take more than %d bytes; "+
			"request fewer models", path, program.ResultVariable, program.MaxResultBytes))
	}
	if err == nil {
		err = program.Replace(path, argv, views)
	}
	return exit.WithOperation("run", path, err) // returns only on failure
}
