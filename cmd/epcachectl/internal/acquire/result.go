package acquire

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func objects(results []modelResult, dryRun bool) []any {
	list := make([]any, len(results))
	for i := range results {
		list[i] = results[i].json(dryRun)
	}
	return list
}

// json returns one element of the list that get --json prints. A failed one keeps its position.
func (r *modelResult) json(dryRun bool) jsonout.Object {
	out := jsonout.Object{"outcome": "missing"} // with -n: it would be compiled
	a := r.reply
	switch {
	case r.missing:
	case r.err != nil:
		out = jsonout.Object{"outcome": "failed", "error": r.err.Error(),
			"hint": strings.Join(exit.Hints(r.err), "; ")}
		if e, is := errors.AsType[*unixsock.Error](r.err); is {
			out["class"], out["facts"] = wire.ErrorClass_name[int32(e.Class)], e.Facts
		}
	default:
		out = jsonout.Of(a, "request_key", "build", "model_digest", "ep", "sdk_version",
			"hardware_architecture", "compatibility", "view", "files", "provider_options",
			"session_options", "compile_seconds", "why", "unkept", "job", "member", "members",
			"warnings")
		out["outcome"], out["graph"], out["elapsed_seconds"] = outcomeOf(a), r.graph,
			r.elapsed.Seconds()
		out["runtime"], out["ep_libraries"] = a.GetRuntime(), epLibraries(a)
		if level := a.GetGraphOptimizationLevel(); level != "" {
			out["session_options"].(jsonout.Object)["graph_optimization_level"] = level
		}
		at := int(a.GetMember())
		if len(r.group) > 0 {
			at = r.member
		}
		if members := a.GetMembers(); at < len(members) {
			out["member"], out["model_digest"] = at, members[at].GetModelDigest()
		}
		switch {
		case r.queued():
			out["outcome"] = "queued"
		case r.job != nil: // it was queued and has ended
			out["outcome"], out["build"] = "compiled", r.job.GetBuild()
			out["ep"] = r.job.GetEp()
			out["elapsed_seconds"] = term.Milliseconds(r.job.GetElapsedMs()).Seconds()
		}
	}
	out["model"], out["dry_run"] = r.path, dryRun // the path as given or found
	return out
}

// epLibraries returns the plugin libraries with which the build loads, by execution provider. A
// program has to register them.
func epLibraries(a *wire.AcquireReply) jsonout.Object {
	out := jsonout.Object{}
	dir := a.GetRuntime()
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		dir = filepath.Dir(dir)
	}
	rt, err := compilers.Find(dir)
	if dir == "" || err != nil {
		return out // the user may not read that directory
	}
	for ep := range a.GetProviderOptions() {
		if lib, err := rt.Library(ep); err == nil {
			out[ep] = lib.Path
		}
	}
	return out
}

type modelResult struct {
	path      string
	reply     *wire.AcquireReply
	view      *os.File
	elapsed   time.Duration
	err       error
	missing   bool      // with -n: it would be compiled
	fetched   bool      // from a remote, for this call
	adopted   bool      // the call stores the model as it is: adopted
	startedAt bool      // with missing: it is being compiled already
	job       *wire.Job // its job after the end, if it was followed
	graph     string    // relative to the view
	// blobs has functions that open the files by name, to copy them from a store without a view of
	// the build.
	blobs map[string]func() (io.ReadCloser, error)
	// group has the paths of all models of a group; nil: no group.
	group  []string
	member int // index of this one
	// ownDaemon is the directory of a build that was compiled here under a claim and has no view,
	// otherwise "".
	ownDaemon string
	// daemon is the user's own daemon if that answered instead of another user's, otherwise nil.
	daemon *unixsock.Client
}

// clientFor returns the connection to the daemon that answered; c is the call's own.
func (r *modelResult) clientFor(c *unixsock.Client) *unixsock.Client { return cmp.Or(r.daemon, c) }

func (r *modelResult) queued() bool { return r.reply.GetOutcome() == "background" && r.job == nil }

// errQueued returns the error for a build that is still being compiled in the background.
func (r *modelResult) errQueued() error {
	return exit.Hint(exit.Missing("it is being compiled"),
		"wait for it: epcachectl jobs follow "+term.Printable(r.reply.GetJob()))
}

func (r *modelResult) line(dryRun bool) string {
	path, a := r.name(), r.reply
	switch {
	case r.startedAt:
		return "would wait for " + path + ": it is being compiled"
	case r.missing:
		return "would compile " + path
	case dryRun && r.adopted && r.passedThrough() &&
		!slices.ContainsFunc(a.GetWarnings(), notAdopted):
		return "would adopt " + path
	case r.passedThrough():
		return passThroughLine(path, a)
	case r.queued():
		return fmt.Sprintf("queued %s: job %s", path, term.TextOrDash(a.GetJob()))
	case r.job != nil:
		return "compiled " + path + ": " + JobResultLine(r.job)
	}
	var size int64
	for _, f := range a.GetFiles() {
		size += f.GetSize()
	}
	outcome := term.Printable(outcomeOf(a))
	switch {
	case dryRun:
		outcome = "would hit"
	case r.fetched && outcome == "hit":
		outcome = "fetched"
	}
	text := fmt.Sprintf("%s %s: %s build %s, %s, %s in %s", outcome, path,
		term.Printable(a.GetEp()), term.TextOrDash(term.Short(a.GetBuild())),
		term.TextOrDash(a.GetCompatibility()), term.Bytes(size), term.Seconds(r.elapsed.Seconds()))
	if s := a.GetCompileSeconds(); s > 0 {
		text += fmt.Sprintf(" (compiled in %s)", term.Seconds(s))
	}
	if len(r.group) == 0 && len(a.GetMembers()) > 0 {
		text += fmt.Sprintf(", model %d of a group of %d", a.GetMember()+1, len(a.GetMembers()))
	}
	return text
}

func notAdopted(warning string) bool { return strings.HasPrefix(warning, "not adopted") }

func passThroughLine(path string, a *wire.AcquireReply) string {
	line := "passthrough " + path + ": it is compiled already, "
	switch a.GetCompatibility() {
	case "unsupported":
		return line + "unsupported: " + term.Printable(a.GetCompatibilityReason())
	case "unknown":
		return line + "whether it loads here is unknown; load the file itself"
	}
	return line + term.TextOrDash(a.GetCompatibility()) + "; load the file itself"
}

// outcomeOf returns the outcome for scripts, with "compiled" for a build that this process compiled
// and put.
func outcomeOf(a *wire.AcquireReply) string {
	if a.GetOutcome() == "put" {
		return "compiled"
	}
	return a.GetOutcome()
}

// JobError returns the error of a job, nil if it is done.
func JobError(job *wire.Job) error {
	if e := job.GetError(); e != nil {
		return &unixsock.Error{Class: e.GetClass(), Text: e.GetText(), Hint: e.GetHint(),
			Facts: e.GetFacts()}
	}
	switch job.GetState() {
	case "done":
		return nil
	case "cancelled":
		return &unixsock.Error{Class: wire.ErrorClass_CANCELLED, Text: "it was cancelled"}
	}
	return fmt.Errorf("job %s is %s", term.Printable(job.GetId()), term.TextOrDash(job.GetState()))
}

// JobResultLine describes the result of a job, how long it took, and how long it was queued.
func JobResultLine(job *wire.Job) string {
	queued := min(max(job.GetStartedMs()-job.GetQueuedMs(), 0), job.GetElapsedMs())
	text := fmt.Sprintf("%s build %s in %s", term.TextOrDash(job.GetEp()),
		term.TextOrDash(term.Short(job.GetBuild())),
		term.Seconds(term.Milliseconds(job.GetElapsedMs()-queued).Seconds()))
	if queued >= 1000 {
		text += " (queued for " + term.Seconds(term.Milliseconds(queued).Seconds()) + ")"
	}
	return text
}

func closeViews(results []modelResult) {
	for _, r := range results {
		if r.ownDaemon != "" {
			os.RemoveAll(r.ownDaemon) // best effort: it is a temporary directory
		}
		if r.view != nil && !r.reportedElsewhere() {
			r.view.Close() // opened for reading
		}
	}
}

// filePath returns the path of a file of a view, for this process and those that inherit the
// descriptor.
func (r *modelResult) filePath(name string) (string, error) {
	switch {
	case r.queued():
		return "", r.errQueued()
	case r.view == nil:
		return "", errors.New("the daemon sent no descriptor of the view")
	case !filepath.IsLocal(name):
		return "", fmt.Errorf("the daemon names a file %q outside the view", name)
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", r.view.Fd(), name), nil
}

func (r *modelResult) opener(name string) (func() (io.ReadCloser, error), error) {
	if open, ok := r.blobs[name]; ok {
		return open, nil
	}
	path, err := r.filePath(name)
	if err != nil {
		return nil, err
	}
	return func() (io.ReadCloser, error) {
		f, err := os.Open(path)
		return f, modelfile.PlainPathError(err)
	}, nil
}

// passedThrough reports whether the model is compiled already, and is loaded from its own files.
func (r *modelResult) passedThrough() bool {
	return r.reply.GetOutcome() == "passthrough" && r.view == nil
}

// isGraph reports whether a file of the view is the graph of a model.
func (r *modelResult) isGraph(name string) bool {
	return name == r.reply.GetGraph() || slices.ContainsFunc(r.reply.GetMembers(),
		func(m *wire.Member) bool { return m.GetGraph() == name })
}

// graphPath returns the path that a program can load: the graph, or the model itself if that is
// compiled already.
func (r *modelResult) graphPath() (string, error) {
	if r.passedThrough() {
		return filepath.Abs(r.path)
	}
	return r.filePath(r.graph)
}

// eachOfGroup returns a result for each model of a group, in order. All share the view. The first
// has the error, and everything that is reported once for a group.
func eachOfGroup(all modelResult, models []string) []modelResult {
	results := make([]modelResult, len(models))
	for i, path := range models {
		r := &results[i]
		*r = all
		r.path, r.group, r.member = path, models, i
		if members := all.reply.GetMembers(); i < len(members) {
			r.graph = members[i].GetGraph()
		}
		if all.err == nil && !all.missing && !all.queued() && all.job == nil &&
			len(all.reply.GetMembers()) != len(models) {
			r.err = exit.WithOperation("get", path, fmt.Errorf("there are %d graphs for %d models",
				len(all.reply.GetMembers()), len(models)))
		}
	}
	return results
}

// reportedElsewhere reports whether another result has the report of this one.
func (r *modelResult) reportedElsewhere() bool { return r.member > 0 }

func (r *modelResult) name() string {
	if len(r.group) == 0 {
		return term.Printable(r.path)
	}
	return "group of " + strings.Join(term.Printables(r.group), ", ")
}

// groupLines returns lines with the graph of each model, and how to load several in one process.
func (r *modelResult) groupLines() []string {
	members := r.reply.GetMembers()
	if len(r.group) == 0 || len(members) == 0 || r.missing {
		return nil
	}
	var lines []string
	for i, m := range members {
		path := m.GetName()
		if i < len(r.group) {
			path = r.group[i]
		}
		lines = append(lines, fmt.Sprintf("  %d. %s  %s", i+1, term.Printable(path),
			term.Printable(m.GetGraph())))
	}
	var options []string
	for key, value := range members[0].GetSessionOptions() {
		options = append(options, term.Printable(key+"="+value))
	}
	return append(lines, "  several in one process: in this order, with "+strings.Join(options,
		" ")+", and destroyed in reverse")
}
