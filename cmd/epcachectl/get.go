package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/program"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// atOnce is how many models one call asks for at the same time; the daemon queues what is too much for it.
const atOnce = 8

// getCall is one call of get, or of a verb that asks as get does.
type getCall struct {
	app      *app
	verb     string // empty: get
	request  request
	onMiss   string
	out      string
	force    bool
	dryRun   bool
	progress bool
	keep     bool
	share    bool
	adopt    bool
	program  []string      // behind "--", empty: none
	claimant *claimant     // compiles under claims; nil until there is one; guarded by once
	state    string        // of a store that is read without a daemon; empty: the daemon is asked
	build    string        // with state: how the build's key begins
	unpackTo string        // with state: a folder for what is unpacked; empty: where programs keep what can be made again
	stored   *cache.Stored // with state: the store
}

// got is what one model came to.
type got struct {
	path    string
	reply   *wire.AcquireReply
	view    *os.File
	elapsed time.Duration
	err     error
	missing bool                                     // with -n: it would be compiled
	adopts  bool                                     // it was to be adopted
	begun   bool                                     // then: it is being compiled already
	job     *wire.Job                                // how its job ended, when that was followed
	graph   string                                   // relative to the view
	blobs   map[string]func() (io.ReadCloser, error) // to copy it from a store that has no view of it: opens the files, by their names; else nil
	group   []string                                 // the paths of all models of the group; nil: it is none
	member  int                                      // which of them it is
	own     *ownFiles                                // that were compiled here under a claim, where there is no view of them; else nil
	// daemon is the user's own, where it answered instead of another user's; else nil
	daemon *unixsock.Client
}

// asked returns the connection to the daemon that answered, where the call asked with c.
func (r *got) asked(c *unixsock.Client) *unixsock.Client { return cmp.Or(r.daemon, c) }

// queued tells whether it is being compiled and was not waited for.
func (r *got) queued() bool { return r.reply.GetOutcome() == "background" && r.job == nil }

// errQueued is why nothing can be done yet with what is compiled in the background.
func (r *got) errQueued() error {
	return exit.Hint(exit.Missing("it is being compiled"), "wait for it: epcachectl jobs follow "+term.Printable(r.reply.GetJob()))
}

// copies tells whether nothing is done with what comes but to copy it.
func (g *getCall) copies() bool { return g.out != "" && len(g.program) == 0 }

// name is the verb's, for messages.
func (g *getCall) name() string { return cmp.Or(g.verb, "get") }

func (a *app) getCommand() *cobra.Command {
	g := &getCall{app: a}
	cmd := &cobra.Command{
		Use:   "get MODEL... [--ep EP[:DEVICE]...] [flags] [-- PROGRAM ARGS]",
		Short: "get the compiled form of models",
		Long: `get asks the daemon for the compiled form of each MODEL. What is there is there at once; what is not is
compiled first, and kept. For each model it prints what it is. Without --ep the execution provider is taken that can compile here, if
there is just one.

With --out DIR it also writes a copy that stands on its own: the graph and the files that it refers to, under
the names that it refers to them by. A file that is there already and differs is left alone unless
-f is given. Of a MODEL that is compiled already the copy is of its own files.

With -- PROGRAM it becomes that program, with {} in the arguments replaced by the path of the compiled
graph. Of several models an argument {} becomes all paths, and {1}, {2}, ... each one. The build is held for as
long as the program runs; signals and the exit status are the program's own. The environment variable EPCACHE_GET has what --json
prints, a list with an element for each MODEL: load the graph with its provider_options and session_options.
Where that is too long for a variable (128 KiB: very many models) it is left out, with a warning.

--on-miss says what to do where nothing is there: wait (compile, and wait for it), background (have it compiled, and do
not wait: it prints "queued" and the job), claim (see below), fail, refresh (compile anew even so), or bypass (compile for
this call only, and keep nothing). What is queued is done as far as get is concerned, unless it was to be copied or run: then it is not found.
A compile ends when all who wait for it have gone; with --keep-going it is finished all the same.

With --share the models, two or more, become one weight-sharing group: they are compiled together, in the given order, and
their graphs share what is equal in them. The group is kept, and found damaged, as one. A model of it that is asked for
alone later, with the same options, is answered from the group.

A MODEL that is compiled already is passed through. With --adopt it is stored, with the files that it
refers to: they are checked as a stranger's, loaded once, and then served, shared and collected as
those of any build. A model that is not adopted is passed through, with a warning that says why.

claim is for libraries that the daemon does not have, or may not run: those in --runtime DIR, which
has to be given. wait turns into it by itself where the daemon runs as another user and has no equal
libraries. The model is compiled here, in a process of its own (epcached-ort beside this program, or EPCACHE_WORKER), and given to the daemon, which
checks and keeps it for all programs of the same user with the same libraries. Where the store has no
space for it the call fails; with --out the files are written all the same, with a warning.

With --state DIR no daemon is asked, started or needed: the store in DIR is read as it is, on a read-only file system as well, nothing is
written there, and every file is hashed before it is given out. It prints the build, and the graph's path on a line of its own. A build that the store
has packed is unpacked into a folder of this user's: DIR of --unpack-to, else epcached/unpacked in XDG_CACHE_HOME (~/.cache), or where that cannot be
written, one in XDG_RUNTIME_DIR or TMPDIR. It is found there again by the next call, and may be deleted at any time; --out unpacks it where it is copied to. Nothing is compiled: what is not there is
not found. No execution provider is asked either, so the compatibility is unknown, or optimal where the libraries in
--runtime DIR are those that made the build; and where builds for several devices or SDKs fit, they are listed, for --build KEY to choose. A store that a
daemon has is refused: ask that one.

With -n nothing is compiled or written; it prints what would be.` + exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NotFound, exit.Damage, exit.NoDaemon, exit.Stale, exit.NotAllowed, exit.Interrupt),
		Example: `  epcachectl get mobilenet.onnx --ep OpenVINOExecutionProvider:CPU
  epcachectl get det.onnx --ep OpenVINOExecutionProvider:NPU,device=0x643e,is_virtual=1
  epcachectl get det.onnx --ep QNNExecutionProvider --option soc_model=60 --dim batch=1 --out compiled/
  epcachectl get model.onnx --ep OpenVINOExecutionProvider --on-miss background
  epcachectl get shipped_ctx.onnx --ep OpenVINOExecutionProvider --adopt
  epcachectl get --share prefill.onnx decode.onnx --ep QNNExecutionProvider --option soc_model=60
  epcachectl get model.onnx --ep OpenVINOExecutionProvider --state /usr/share/epcached
  epcachectl get model.onnx --ep OpenVINOExecutionProvider -- python3 serve.py --model={}`,
		RunE: func(cmd *cobra.Command, args []string) error {
			models := args
			if dash := cmd.ArgsLenAtDash(); dash >= 0 {
				models, g.program = args[:dash], args[dash:]
				if len(g.program) == 0 {
					return exit.Usage(errors.New("no program behind --"))
				}
			}
			return g.run(cmd.Context(), models)
		},
	}
	g.request.addFlags(cmd)
	f := cmd.Flags()
	f.StringVar(&g.onMiss, "on-miss", "wait", "wait, background, claim, fail, refresh or bypass")
	f.BoolVar(&g.keep, "keep-going", false, "finish the compile though this call is interrupted")
	f.StringVar(&g.out, "out", "", "write a copy of each model's files into `DIR`")
	f.BoolVarP(&g.force, "force", "f", false, "replace files in --out that differ")
	f.BoolVarP(&g.dryRun, "dry-run", "n", false, "compile and write nothing, print what would be done")
	f.BoolVar(&g.progress, "progress", false, "print each phase on a line of its own to standard error")
	f.StringVar(&g.state, "state", "", "read the store in `DIR`, and write nothing: no daemon is asked or started")
	f.StringVar(&g.build, "build", "", "with --state: only the build whose `KEY` begins so")
	f.StringVar(&g.unpackTo, "unpack-to", "", "with --state: unpack what is packed into `DIR`, which is this user's alone")
	f.BoolVar(&g.share, "share", false, "compile the models as one weight-sharing group, in this order")
	f.BoolVar(&g.adopt, "adopt", false, "keep models that are compiled already, with their files")
	return cmd
}

func (g *getCall) run(ctx context.Context, models []string) (err error) {
	onMiss, err := g.check(models)
	if err != nil {
		return err
	}
	defer func() {
		if g.claimant != nil {
			err = errors.Join(err, g.claimant.close())
		}
	}()
	if g.onMiss == "claim" {
		if _, err := g.claiming(); err != nil {
			return err
		}
	}
	if g.state != "" {
		return g.app.WithTimeout(ctx, func(ctx context.Context) error {
			if err := g.openStore(ctx); err != nil {
				return err
			}
			return g.acquireAndUse(ctx, nil, models, onMiss)
		})
	}
	return g.app.WithDaemon(ctx, func(ctx context.Context, c *unixsock.Client) error {
		if err := g.request.onlyEP(ctx, c, g.app); err != nil {
			return exit.During("get", err)
		}
		return g.acquireAndUse(ctx, c, models, onMiss)
	})
}

// acquireAndUse asks for all models, and does with the results what is wanted of them. Without a
// client the store that is read answers.
func (g *getCall) acquireAndUse(
	ctx context.Context, c *unixsock.Client, models []string, onMiss wire.OnMiss,
) error {
	acquire := g.acquireAll
	if g.share {
		acquire = g.acquireGroup
	}
	results := acquire(ctx, c, models, onMiss)
	defer closeViews(results)
	err := g.report(results)
	if err == nil && g.out != "" {
		err = g.copyOut(ctx, results)
	}
	if err == nil && len(g.program) > 0 && !g.dryRun {
		err = g.become(results)
	}
	return err
}

func (g *getCall) check(models []string) (wire.OnMiss, error) {
	if len(models) == 0 {
		return 0, exit.Usage(exit.Hint(errors.New("get: no model"), "epcachectl get MODEL --ep EP"))
	}
	if g.share && len(models) < 2 {
		return 0, exit.Usage(exit.Hint(errors.New("get: --share: a group has two models or more"), "epcachectl get --share MODEL MODEL... --ep EP"))
	}
	if g.share && g.request.embed {
		return 0, exit.Usage(errors.New("get: --share: what the models share stands in a file of its own, so --embed cannot go with it"))
	}
	if len(g.program) > 0 && g.app.JSON {
		return 0, exit.Usage(errors.New("get: --json cannot go with a program, whose output standard output is"))
	}
	if err := program.CheckPlaces(g.program, len(models)); err != nil {
		return 0, err
	}
	complete := g.request.completeOrEP
	if g.onMiss == "claim" { // the daemon may know nothing of those libraries
		complete = g.request.complete
	}
	if err := complete(); err != nil {
		return 0, err
	}
	if err := g.checkStored(); err != nil {
		return 0, err
	}
	if g.adopt && (g.state != "" || g.share) {
		return 0, exit.Usage(errors.New("get: --adopt keeps single models in a daemon's store, " +
			"and cannot go with --state or --share"))
	}
	if g.onMiss == "claim" && g.share {
		return 0, exit.Usage(errors.New("get: --on-miss claim is for one model at a time, and --share for several at once"))
	}
	if g.onMiss == "claim" && g.request.runtime == "" {
		return 0, exit.Usage(exit.Hint(errors.New("get: --on-miss claim compiles with libraries of your own, and there is no --runtime"), "name their folder: --runtime DIR"))
	}
	onMiss, known := onMissNames[g.onMiss]
	switch {
	case !known:
		return 0, exit.Usage(fmt.Errorf("get: --on-miss %q: it is wait, background, claim, fail, refresh or bypass", g.onMiss))
	case g.dryRun:
		return wire.OnMiss_FAIL, nil
	}
	return onMiss, nil
}

var onMissNames = map[string]wire.OnMiss{
	"wait": wire.OnMiss_WAIT, "fail": wire.OnMiss_FAIL, "refresh": wire.OnMiss_REFRESH, "bypass": wire.OnMiss_BYPASS,
	"background": wire.OnMiss_BACKGROUND, "claim": wire.OnMiss_CLAIM,
}

// acquireAll asks for all models at once, and answers in their order.
func (g *getCall) acquireAll(ctx context.Context, c *unixsock.Client, models []string, onMiss wire.OnMiss) []got {
	show := term.NewPhases(g.app.Print, g.progress, len(models))
	defer show.End()
	return acquireEach(ctx, c, g.asksFor(models), onMiss, show)
}

func (g *getCall) acquire(ctx context.Context, c *unixsock.Client, path string, onMiss wire.OnMiss, show *term.Phases) got {
	return g.acquireModels(ctx, c, []string{path}, onMiss, show)
}

// acquireModels asks for one model, or for several as a group.
func (g *getCall) acquireModels(ctx context.Context, c *unixsock.Client, paths []string, onMiss wire.OnMiss, show *term.Phases) got {
	path := paths[0]
	result := got{path: path, adopts: g.adopt}
	defer show.Done(path)
	models, failed, err := modelfile.OpenAll(paths)
	if err != nil {
		result.err = exit.Failing(g.name(), failed, err)
		return result
	}
	defer modelfile.CloseAll(models)
	message, files, err := g.request.message(models[0])
	if err != nil {
		result.err = exit.Failing(g.name(), path, err)
		return result
	}
	defer closeExtra(files)
	files = addGroup(message, files, models[1:]) // which closeModels closes
	message.OnMiss, message.KeepGoing, message.Adopt = onMiss, g.keep, g.adopt
	message.HoldsView = !g.app.JSON // which prints the view's path, and so leaves it to others; else it is for this process, and what that becomes
	start := time.Now()
	external := func(i int, location string) (*os.File, error) { return models[i].External(location) }
	var last atomic.Pointer[wire.Progress]
	progress := func(p *wire.Progress) {
		last.Store(p)
		show.Phase(path, p)
	}
	if g.stored != nil {
		if err := g.find(ctx, message, files, external, progress, &result); err != nil {
			result.err = exit.Failing(g.name(), path, storedError(err))
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
			result.reply, result.view, result.own, err = cl.work(ctx, c, models[0], g, result.reply,
				progress)
		}
		return err
	}
	err = ask(c)
	if unixsock.WentAway(err) {
		err = g.app.Again(ctx, ask)
	}
	if slices.Contains(instead(err), "own") {
		if own, ownErr := g.app.OwnDaemon(ctx); ownErr == nil {
			result.daemon, err = own, ask(own)
		}
	}
	result.elapsed = time.Since(start)
	result.graph = result.reply.GetGraph()
	if result.own != nil {
		result.blobs = result.own.openers()
	}
	if err == nil && result.passedThrough() {
		err = checkReferences(ctx, path)
	}
	switch {
	case err == nil:
		result.missing = g.dryRun && g.compilesAnyway() && result.reply.GetOutcome() == "hit"
	case g.dryRun && g.wouldCompile(err):
		result.missing, result.begun = true, underWay(err)
	default:
		result.err = exit.Early(ctx, exit.Failing(g.name(), path, g.withHint(err, paths)), g.app.Timeout, func() (string, string) { return g.fate(last.Load()) })
	}
	return result
}

// mayClaim tells whether the daemon proposes a claim instead, which this call can take: for one
// model, with --runtime. A daemon that can compile nothing for this user proposes one of the user's
// own before that.
func (g *getCall) mayClaim(err error, onMiss wire.OnMiss, paths []string) bool {
	ways := instead(err)
	if len(ways) > 0 && ways[0] == "own" && g.app.DaemonProgram() != "" {
		return false
	}
	return slices.Contains(ways, "claim") && onMiss == wire.OnMiss_WAIT && len(paths) == 1
}

// compilesAnyway tells whether the call compiles a model that has a build as well.
func (g *getCall) compilesAnyway() bool { return g.onMiss == "refresh" || g.onMiss == "bypass" }

// wouldCompile tells whether the call would compile the model that a dry run ended for with err: there
// is no build, and no remembered failure that is the answer instead.
func (g *getCall) wouldCompile(err error) bool {
	return errors.Is(err, unixsock.ErrNotFound) && g.onMiss != "fail" &&
		(g.compilesAnyway() || !failedBefore(err))
}

// once guards what the models of a call share and the first one makes that needs it.
var once sync.Mutex

// claiming gives what compiles under claims.
func (g *getCall) claiming() (*claimant, error) {
	once.Lock()
	defer once.Unlock()
	var err error
	if g.claimant == nil {
		g.claimant, err = newClaimant(&g.request)
	}
	return g.claimant, err
}

// withHint tells how to get what is missing with this program; the daemon's own hint is in the protocol's words.
func (g *getCall) withHint(err error, paths []string) error {
	var e *unixsock.Error
	if !errors.Is(err, unixsock.ErrNotFound) || !errors.As(err, &e) || failedBefore(err) {
		return err
	}
	plain := *e
	plain.Hint = ""
	hint := "compile it: epcachectl get "
	if underWay(err) {
		hint = "wait for it: epcachectl get "
	}
	hint += g.request.flags()
	if len(paths) > 1 {
		hint += "--share "
	}
	hint += strings.Join(term.Printables(paths), " ")
	if job := e.Facts["job"]; job != "" {
		hint += ", or epcachectl jobs follow " + term.Printable(term.Short(job))
	}
	return exit.Hint(&plain, hint)
}

// underWay tells whether there is no build yet because it is being compiled.
func underWay(err error) bool {
	var e *unixsock.Error
	return errors.As(err, &e) && e.Facts["phase"] != ""
}

// failedBefore tells whether there is no build because the daemon remembers that the model does not compile.
func failedBefore(err error) bool {
	var e *unixsock.Error
	return errors.As(err, &e) && e.Facts["reason"] != ""
}

// report prints every model's result, and gives the exit code of the first that failed.
func (g *getCall) report(results []got) error {
	var failed error
	for _, r := range results {
		if r.told() && (r.err == nil || failed != nil) {
			continue
		}
		if r.err != nil {
			g.app.Print.Failure(r.err)
			if failed == nil {
				failed = exit.Status(exit.Code(r.err))
			}
			continue
		}
		for _, warning := range r.reply.GetWarnings() {
			g.app.Print.Warning(fmt.Sprintf("%s %q: %s", g.name(), r.path, warning))
		}
		if !g.app.JSON && len(g.program) == 0 {
			g.app.Print.Line("%s", r.line(g.dryRun))
			if g.state != "" && r.view != nil {
				g.app.Print.Line("  %s", term.Printable(filepath.Join(r.reply.GetView(), filepath.FromSlash(r.graph))))
			}
			for _, line := range r.groupLines() {
				g.app.Print.Line("%s", line)
			}
		}
	}
	if g.app.JSON {
		return errors.Join(failed, g.app.Print.JSON(objects(results, g.dryRun)))
	}
	return failed
}

func (r *got) line(dryRun bool) string {
	path := r.name()
	if r.begun {
		return "would wait for " + path + ": it is being compiled"
	}
	if r.missing {
		return "would compile " + path
	}
	a := r.reply
	switch {
	case dryRun && r.wouldAdopt():
		return "would adopt " + path
	case r.passedThrough():
		return passThroughLine(path, a)
	case r.queued():
		return fmt.Sprintf("queued %s: job %s", path, term.OrDash(a.GetJob()))
	case r.job != nil:
		return "compiled " + path + ": " + jobResultLine(r.job)
	}
	var size int64
	for _, f := range a.GetFiles() {
		size += f.GetSize()
	}
	outcome := term.Printable(outcomeOf(a))
	if dryRun {
		outcome = "would hit"
	}
	text := fmt.Sprintf("%s %s: %s build %s, %s, %s in %s", outcome, path, term.Printable(a.GetEp()), term.OrDash(term.Short(a.GetBuild())), term.OrDash(a.GetCompatibility()), term.Bytes(size), term.Seconds(r.elapsed.Seconds()))
	if s := a.GetCompileSeconds(); s > 0 {
		text += fmt.Sprintf(" (compiled in %s)", term.Seconds(s))
	}
	if len(r.group) == 0 && len(a.GetMembers()) > 0 {
		text += memberNote(a)
	}
	return text
}

// wouldAdopt tells of a dry run whether the model would be adopted.
func (r *got) wouldAdopt() bool {
	refused := func(warning string) bool { return strings.HasPrefix(warning, "not adopted") }
	return r.adopts && r.passedThrough() && !slices.ContainsFunc(r.reply.GetWarnings(), refused)
}

// checkReferences fails where a file that a compiled model refers to is not there, because no session
// loads the model then.
func checkReferences(ctx context.Context, path string) error {
	m, err := modelfile.Open(path)
	if err != nil {
		return err
	}
	defer m.Close()
	names, err := m.References(ctx)
	for _, name := range names {
		if err == nil {
			var f *os.File
			if f, err = m.External(name); err == nil {
				f.Close() // only whether it opens was asked
			}
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil // of another mistake the daemon knows more, because it has read the graph
}

// passThroughLine says what is known of a model that is compiled already.
func passThroughLine(path string, a *wire.AcquireReply) string {
	compatibility := term.OrDash(a.GetCompatibility())
	line := fmt.Sprintf("passthrough %s: it is compiled already, %s", path, compatibility)
	switch a.GetCompatibility() {
	case "unsupported":
		return line + ": " + term.Printable(a.GetCompatibilityReason())
	case "unknown":
		line = fmt.Sprintf("passthrough %s: it is compiled already, whether it loads here is not known", path)
	}
	return line + "; load it as it is"
}

// outcomeOf is what a call came to, in the words that scripts know: what was compiled here and put has been compiled.
func outcomeOf(a *wire.AcquireReply) string {
	if a.GetOutcome() == "put" {
		return "compiled"
	}
	return a.GetOutcome()
}

// fate tells what becomes of a model's compile when its request leaves: last is what was last heard of it.
func (g *getCall) fate(last *wire.Progress) (text, hint string) {
	if last.GetPhase() == "" {
		return "", ""
	}
	during := "(" + term.Printable(last.GetPhase()) + ")"
	if last.GetJob() == "" {
		return during, ""
	}
	follow := "epcachectl jobs follow " + term.Printable(term.Short(last.GetJob()))
	switch {
	case g.keep:
		return during + ": the compile goes on, as --keep-going has it", "wait for it: " + follow
	case last.GetWaiting() > 1:
		return during + ": the compile goes on, for others wait for it too", "wait for it: " + follow
	}
	return during + ": the compile ends, unless somebody else wants it", "with --keep-going it is finished all the same, and with --on-miss background it is not waited for"
}

// become runs the program in the place of this process: so it has the descriptor of the view under the same
// number, gets its signals itself, and its exit status needs no passing on. The build is held until it ends, for the
// descriptor is the lease.
func (g *getCall) become(results []got) error {
	paths := make([]string, len(results))
	var views []*os.File
	for i := range results {
		graph, err := results[i].graphPath()
		if err != nil {
			return exit.Failing("get", results[i].path, err)
		}
		paths[i] = graph
		if results[i].view != nil && !results[i].told() {
			views = append(views, results[i].view)
		}
	}
	path, err := program.Find(g.program[0])
	if err != nil {
		return exit.Failing("run", g.program[0], err)
	}
	argv := program.FillPlaces(g.program, paths)
	g.app.Print.Clear()
	if told, err := program.Tell(objects(results, false)); err != nil {
		return exit.Failing("run", path, err)
	} else if !told {
		g.app.Print.Warning(fmt.Sprintf("run %q: %s is left out: it would take more than %d bytes; ask for fewer models at once", path, program.ToldVariable, program.MaxTold))
	}
	if err := program.Replace(path, argv, views); err != nil {
		return exit.Failing("run", path, err)
	}
	return nil
}
