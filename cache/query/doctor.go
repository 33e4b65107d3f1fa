package query

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/audit"
	"github.com/epcached/epcached/unixsock/wire"
)

// Advice is the result of one check, with its remedy.
type Advice struct {
	Severity string // "problem", "warning", "info", "ok"
	Subject  string // "disk", "runtime /opt/ort", ...
	Text     string
	Hint     string
}

// The severities of advice.
const (
	SeverityProblem = "problem" // something does not work
	SeverityWarning = "warning" // something works less well than it could, or may not for long
	SeverityOK      = "ok"
	SeverityInfo    = "info" // to know, and nothing to do
)

func problem(subject, format string, args ...any) Advice {
	return Advice{Severity: SeverityProblem, Subject: subject, Text: fmt.Sprintf(format, args...)}
}

func warning(subject, format string, args ...any) Advice {
	return Advice{Severity: SeverityWarning, Subject: subject, Text: fmt.Sprintf(format, args...)}
}

func fine(subject, format string, args ...any) Advice {
	return Advice{Severity: SeverityOK, Subject: subject, Text: fmt.Sprintf(format, args...)}
}

func (a Advice) hint(format string, args ...any) Advice {
	a.Hint = fmt.Sprintf(format, args...)
	return a
}

// Doctor looks for problems of runtimes, disk, clock, permissions, watching, index, and for recent
// failures.
type Doctor struct{ q *Queries }

// Doctor returns the doctor of this store.
func (q *Queries) Doctor() *Doctor { return &Doctor{q} }

// Examine returns the advice of all checks. It probes runtimes in workers, and changes nothing.
func (d *Doctor) Examine(ctx context.Context, p rights.Peer) (*wire.DoctorReply, error) {
	out := slices.Concat(d.adviseConfiguration(), adviseLimits(),
		d.adviseRuntimes(ctx), d.DriverAdvice(),
		d.StateAdvice(), d.adviseState(), d.adviseLayers(), d.SpaceAdvice(p), d.adviseSandbox(ctx),
		d.adviseRemotes(), []Advice{d.adviseClock()}, d.adviseWatching(), d.adviseIndex(),
		d.adviseBuilds(ctx, p), d.adviseSources(ctx, p), d.LatelyAdvice(p))
	if ctx.Err() != nil {
		return nil, apierr.FromContext(ctx, "doctor")
	}
	reply := &wire.DoctorReply{}
	for _, a := range out {
		reply.Advice = append(reply.Advice, &wire.Advice{Severity: a.Severity,
			Subject: wire.Valid(a.Subject), Text: wire.Valid(a.Text), Hint: wire.Valid(a.Hint)})
	}
	return reply, nil
}

// DriverAdvice warns of configured drivers without a readable version.
func (d *Doctor) DriverAdvice() []Advice {
	var out []Advice
	for _, err := range d.q.options.Runtimes.Machine().UnreadableSources() {
		out = append(out, warning("driver version", "cannot be read: %v", err).
			hint("until it can be read the last version is used; see [[driver]] in the daemon's "+
				"configuration"))
	}
	return out
}

// adviseRemotes reports remotes that do not answer, refuse, or cannot be written to.
func (d *Doctor) adviseRemotes() (out []Advice) {
	for _, r := range d.q.options.Remotes() {
		subject, before := "remote "+r.Name, len(out)
		if r.BreakerSeconds > 0 || r.Failing {
			out = append(out, warning(subject, "it fails, and models are compiled without it: %s",
				r.LastError).
				hint("epcachectl remote check %s", r.Name))
		} else if r.Denied > 0 {
			out = append(out, warning(subject, "it refused %d calls: %s", r.Denied, r.LastError).
				hint("look at the credentials of epcached-remote and at the rights of the bucket"))
		}
		switch {
		case r.TrustError == "":
		case r.TrustExpiresMs > wire.Milliseconds(d.q.options.Now()):
			out = append(out, warning(subject, "its trust document was refused: %s", r.TrustError))
		default:
			out = append(out, problem(subject, "no build is fetched: %s", r.TrustError).
				hint("sign a new one: epcachectl remote revoke %s --key ROOT.key", r.Name))
		}
		if r.PublishError != "" {
			out = append(out, problem(subject, "builds are not published: %s", r.PublishError).
				hint("when it is mended: epcachectl push MODEL --remote %s", r.Name))
		}
		if len(out) == before {
			out = append(out, fine(subject, "%d builds fetched, %d published", r.Fetched,
				r.Published))
		}
	}
	return out
}

func (d *Doctor) adviseRuntimes(ctx context.Context) []Advice {
	all := d.q.options.Runtimes.All()
	if len(all) == 0 {
		return []Advice{adviseNoRuntime(d.q.options.UID)}
	}
	var out []Advice
	for _, rt := range all {
		out = append(out, d.adviseRuntime(ctx, rt)...)
	}
	return out
}

func adviseNoRuntime(uid uint32) Advice {
	if uid != 0 {
		return fine("runtimes", "none is registered; applications of this user use their own").
			hint("give epcachectl --runtime DIR, or register one: epcached --runtime DIR, or " +
				"[[runtime]] in the configuration")
	}
	return problem("runtimes", "no runtime is registered: the daemon compiles only for clients "+
		"that bring their own").
		hint("start epcached with --runtime DIR, a directory made by: pip install --no-deps " +
			"--target DIR onnxruntime onnxruntime-ep-openvino")
}

func (d *Doctor) adviseRuntime(ctx context.Context, rt *runtimes.Runtime) []Advice {
	subject := "runtime " + rt.Name
	facts := d.q.options.Runtimes.Probe(ctx, rt)
	if facts.Err != nil {
		return []Advice{adviseUnusable(subject, facts.Err)}
	}
	var out []Advice
	for _, ep := range facts.Facts.EPs {
		wrong := facts.MarkErrors[ep.Name]
		if wrong == nil && len(ep.Devices) > 0 {
			// try again, because an earlier result may not be valid in this process
			wrong = d.q.options.Try(ctx, rt, &facts, ep.Name)
		}
		out = append(out, adviseEP(subject, facts.Facts.ORTVersion, ep, wrong,
			facts.Marks[ep.Name]))
	}
	if s, err := fileSystemOf(facts.Spec.ORTLibrary); err == nil && !s.timesHold {
		out = append(out, warning(subject, "it is on %s, where file times do not change with "+
			"every write: its libraries are hashed at each start", s.kind).
			hint("a directory on ext4, XFS, btrfs or f2fs starts faster"))
	}
	return out
}

func adviseUnusable(subject string, cause error) Advice {
	hint := "epcachectl probe --refresh tries again and shows the whole error"
	if errors.Is(cause, fs.ErrNotExist) || errors.Is(cause, compilers.ErrNotFound) {
		hint = "the directory was moved or removed, or has no ONNX Runtime with an execution " +
			"provider: install it again, or register another"
	}
	return problem(subject, "it cannot be used: %v", cause).withCause(cause, hint)
}

func adviseEP(subject, ort string, ep compilers.EPProbe, markError error,
	mark compilers.Fingerprint) Advice {
	subject += " " + ep.Name
	cause := markError
	if ep.Error != "" {
		cause = cmp.Or(ep.Err, errors.New(ep.Error))
	}
	switch {
	case ep.Error == "" && len(ep.Devices) == 0:
		why, help := runtimes.WhyNoDevice(ep.Name)
		return warning(subject, "it loads, and lists no device on this machine: %s", why).
			hint("it cannot compile here; %s", help)
	case errors.Is(cause, compilers.ErrNoContexts):
		return Advice{Severity: SeverityInfo, Subject: subject,
			Text: compilers.ErrNoContexts.Error(),
			Hint: "its sessions load models without epcached, and wait for nothing"}
	case cause == nil:
		var devices []string
		for _, d := range ep.Devices {
			devices = append(devices, strings.TrimSpace(d.Type+" "+d.Vendor))
		}
		sdk := ""
		if mark.SDKVersion != "" {
			sdk = " (SDK " + mark.SDKVersion + ")"
		}
		return fine(subject, "it compiles with ONNX Runtime %s for %s%s", ort,
			strings.Join(devices, ", "), sdk).
			hint("a session that only names it in providers= runs on the CPU: register its " +
				"library and add its devices, as epcache.InferenceSession does")
	}
	what := "it does not load"
	if ep.Error == "" {
		what = "it loads, but even a model of one node does not compile and load"
	}
	a := problem(subject, "%s with ONNX Runtime %s: %s", what, ort,
		compilers.LastWords(cause.Error()))
	return a.withCause(cause, "its library may not fit this ONNX Runtime, or a library that it "+
		"needs is missing; epcachectl probe --refresh tries again")
}

// cause is an error with a known remedy, recognised by its value, or by its text if only a worker's
// output has it.
type cause struct {
	err  error  // nil: recognised only by text
	text string // part of the message
	of   string // the program that prints it, and a version that does
	hint string
}

const (
	fullDisk  = "the disk is full, which prevented the test: free some space, and repeat it"
	fullQuota = "the disk quota of the daemon's user is used up, which prevented the test: " +
		"free some space or raise the quota, and repeat it"
	fewFiles = "the daemon's limit on open files is reached: raise it, ulimit -n or LimitNOFILE= " +
		"of its unit, and start the daemon again"
	unreadable = "the daemon's user cannot read it: let that user and the workers read every " +
		"library and pass every directory above; name other files in [sandbox] read, and device " +
		"files in [sandbox] write"
	inGo   = "the kernel, in the words of Go 1.26"
	inC    = "the kernel, in the words of glibc 2.36"
	loader = "the loader of glibc 2.36"
)

// causes are tried in this order.
var causes = []cause{
	{syscall.ENOSPC, syscall.ENOSPC.Error(), inGo, fullDisk},
	{nil, "No space left on device", inC, fullDisk},
	{syscall.EDQUOT, syscall.EDQUOT.Error(), inGo, fullQuota},
	{nil, "Disk quota exceeded", inC, fullQuota},
	{syscall.EMFILE, syscall.EMFILE.Error(), inGo, fewFiles},
	{nil, "Too many open files", inC, fewFiles},
	{nil, "Experimental function", "ONNX Runtime 1.31.1", "it needs functions that later ONNX " +
		"Runtimes do not have: OpenVINO's 1.7.0 and 1.8.0 need ONNX Runtime 1.24.4 to 1.28.0; " +
		"install such a version beside it, or a later execution provider (1.8.1 works with " +
		"1.31.1)"},
	{nil, "API version", "ONNX Runtime 1.22.0", "ONNX Runtime is too old for this execution " +
		"provider: install a later onnxruntime beside it"},
	{identity.ErrNoLibrary, "", "", "a library beside it is missing: install the whole package"},
	{nil, "libcuda.so.1: cannot open", loader, "NVIDIA's driver is missing: install it; the " +
		"package does not have it"},
	{nil, "name its execution provider so", "epcached-ort", "[[runtime]] with ort_library and " +
		"ep_libraries names the library with its execution provider"},
	{nil, "cannot open shared object file", loader, "a library that it needs is missing: " +
		"install the complete package, and its vendor's requirements"},
	{nil, "version `GLIBC", loader,
		"it was built for a later system than this one: install a release made for this " +
			"distribution"},
	{nil, "failed to map segment", loader, "it is on a file system mounted noexec: move the " +
		"runtime"},
	{nil, "cannot allocate memory in static TLS", loader,
		"too many large libraries are loaded into the worker: see LD_PRELOAD in the daemon's " +
			"environment"},
	{compilers.ErrStart, "", "", "put the worker program epcached-ort beside epcached, of the " +
		"same version, executable by the workers' user"},
	{fs.ErrPermission, fs.ErrPermission.Error(), inGo, unreadable},
	{nil, "Permission denied", inC, unreadable},
	{nil, "can't protect", "OpenVINO's code generator (1.8.1)", "OpenVINO generates code, and " +
		"the worker may not make memory executable: remove MemoryDenyWriteExecute from the " +
		"unit, or the other rule that forbids it"},
	{compilers.ErrCrash, "", "", "the execution provider crashed, in a process of its own: try " +
		"another version of it; the kernel's log may say more"},
	{compilers.ErrTimeout, "", "", "it did not answer in time: a driver may be blocked"},
}

// withCause sets the hint of the error's known cause, or otherwise.
func (a Advice) withCause(err error, otherwise string) Advice {
	a.Hint = otherwise
	for _, c := range causes {
		if c.err != nil && errors.Is(err, c.err) || c.text != "" &&
			strings.Contains(err.Error(), c.text) {
			a.Hint = c.hint
			break
		}
	}
	return a
}

func (d *Doctor) adviseWatching() []Advice {
	var out []Advice
	for _, rt := range d.q.options.Runtimes.All() {
		if how := d.q.options.Runtimes.Watched(rt); how != "" {
			out = append(out, adviseWatch(rt.Name, how))
		}
	}
	return slices.Compact(out) // because each runtime without problems has the same advice
}

func adviseWatch(runtime, how string) Advice {
	why, polled := strings.CutPrefix(how, "polled: ")
	if !polled {
		return fine("watching", "changes of libraries are noticed at once")
	}
	return warning("watching", "the files of %s are polled and not watched: %s; answers are "+
		"right all the same, but recompiling begins later", runtime, why).
		hint("a network file system cannot be watched; otherwise raise "+
			"fs.inotify.max_user_watches, which is %s, or max_user_instances, which is %s",
			sysctl("fs/inotify/max_user_watches"), sysctl("fs/inotify/max_user_instances"))
}

func (d *Doctor) adviseIndex() []Advice {
	const subject = "index"
	var out []Advice
	if why := d.q.options.Killed; why != "" {
		out = append(out, warning("memory", "%s", why).hint("give it more memory, or compile less "+
			"at once: jobs, jobs_memory_bytes and [limits] in the configuration"))
	}
	if why := d.q.index.Rebuilt(); why != "" {
		out = append(out, warning(subject, "the database was rebuilt from the manifests: %s", why).
			hint("only counters are lost; if it happens again, check the disk"))
	}
	problems := d.q.index.Problems()
	for _, p := range d.q.packing.Recipes.Problems() {
		f := audit.RecipeFinding(p)
		problems = append(problems, index.Finding{Kind: f.Kind, Object: f.Object, Detail: f.Detail})
	}
	for i, f := range problems {
		if i == maxFindings {
			out = append(out, problem(subject, "and %d more", len(problems)-i).
				hint("epcachectl check --deep lists them all"))
			break
		}
		a := problem(subject, "%s %s: %s", f.Kind, f.Object, f.Detail).
			hint("damaged files are in quarantine, and the next request recompiles them; " +
				"unreadable files stay and prevent eviction until they can be read or " +
				"epcachectl repair quarantines them; check the disk")
		if f.Kind == "newer" {
			a.Hint = "a newer epcached wrote it, so it is not used: install that version again, " +
				"or delete it"
		}
		if f.Kind == "foreign" {
			a.Hint = "epcached did not write it and ignores it: delete it"
		}
		out = append(out, a)
	}
	if len(out) == 0 {
		out = append(out, fine(subject, "manifests, journal and database are consistent"))
	}
	return out
}

const maxFindings = 10

// adviseBuilds counts the builds of all users, which is for administrators.
func (d *Doctor) adviseBuilds(ctx context.Context, p rights.Peer) []Advice {
	if !d.q.rights.IsAdministrator(p) {
		return nil
	}
	space, err := d.q.index.Space()
	if err != nil {
		return []Advice{problem("builds", "they cannot be counted: %v", err).
			hint("epcachectl check --deep")}
	}
	states := make(map[string]int)
	served := int(space.Builds)
	// the withheld builds only, because reading all records would take seconds
	for _, id := range d.q.index.Journal.NotServed() {
		if _, err := d.q.index.Get(id); err == nil && ctx.Err() == nil {
			states[d.q.index.Journal.StateOf(id).Name]++
			served--
		}
	}
	var out []Advice
	if n := states[index.Damaged]; n > 0 {
		out = append(out, warning("builds", "%d not served, because damaged", n).
			hint("the next request recompiles each; if there are more of them, check the disk "+
				"and the rights of %s", d.q.options.Dir))
	}
	if n := states[index.Withheld]; n > 0 {
		out = append(out, warning("builds", "%d not served, because withheld", n).
			hint("epcachectl list shows them, and epcachectl why ENTRY the reason"))
	}
	if p := d.q.store.ScrubState().Result(); p.Damaged > 0 {
		out = append(out, warning("builds", "stored files verified in the background: "+
			"%s", p).hint("check the disk and its cables, and the memory: epcachectl events "+
			"shows the builds"))
	} else if !p.Began.IsZero() {
		out = append(out, fine("builds", "stored files verified in the background: %s", p))
	}
	return append(out, fine("builds", "%d may be served", served))
}

const recentPeriod = 24 * time.Hour

// LatelyAdvice reports the last day's failures that the peer may see, to administrators with texts.
func (d *Doctor) LatelyAdvice(p rights.Peer) []Advice {
	counts := make(map[string]int)
	last := ""
	for _, e := range d.q.index.Journal.Events(d.q.options.Now().Add(-recentPeriod)) {
		if !d.q.rights.MaySeeEvent(p, &e) {
			continue
		}
		counts[e.Kind]++
		if e.Kind == event.Failed {
			last = e.Text
		}
	}
	var out []Advice
	if n, good := counts[event.Failed], counts[event.Compiled]; n >= 3 && n > good {
		a := warning("compiles", "%d failed in the last day, and %d succeeded", n, good).
			hint("epcachectl events shows why; load a model that always fails without epcached")
		if d.q.rights.IsAdministrator(p) {
			a.Text += "; the last: " + identity.Truncated(last)
		}
		out = append(out, a)
	} else {
		out = append(out, fine("compiles", "%d succeeded in the last day, and %d failed", good, n))
	}
	if n := counts[event.Damaged]; n > 0 {
		out = append(out, warning("damage", "builds found damaged in the last day: %d", n).
			hint("another program writes below %s, or the disk fails: see the kernel's log, and "+
				"epcachectl check --deep", d.q.options.Dir))
	}
	return out
}
