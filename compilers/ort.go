package compilers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/epcached/epcached/compilers/workerproto"
)

// Credential is the user that workers run as. Only a daemon that runs as root can give one.
type Credential struct {
	UID, GID uint32
	Groups   []uint32 // supplementary groups, because devices may belong to one
}

// ORTOptions configure the ORT compiler.
type ORTOptions struct {
	Worker string // path of epcached-ort; empty: beside the running program
	Limits Limits
	Log    *slog.Logger // nil: no log
	// User, unless nil, is the user that workers run as. It must be able to read models and graphs,
	// and to enter all directories above a job's.
	User *Credential
	// Socket is of the unit that starts workers, with User from UnitCredential; "": workers are
	// children of this process.
	Socket string
	// Scratch is for temporary directories of jobs that have none; "": the system's temporary
	// directory.
	Scratch string
	Env     []string // "NAME=value" added to the workers' environment, which is otherwise fixed
	Sandbox SandboxOptions
}

// ORT compiles with ONNX Runtime, in worker processes.
type ORT struct {
	opts     ORTOptions
	launcher *launcher
	// stacks is the address space that threads may reserve in addition to a default memory limit.
	stacks        int64
	host          *host         // the system's safeguards that workers get
	leftDirs      []os.DirEntry // directories in Scratch of an earlier process
	leave         sync.Once     // removes leftDirs, which only the workers' unit can do
	startTimeout  time.Duration // for a worker's process, or an instance of the workers' unit
	sandboxResult sandboxResult
	// unknown has, by path, the EPs that need more than the known system calls.
	unknown sync.Map
	tools   map[string]Tool // by EP: see AddTools
}

var (
	_ Compiler          = (*ORT)(nil)
	_ SandboxReporter   = (*ORT)(nil)
	_ OpenModelCompiler = (*ORT)(nil)
	_ ToolCompiler      = (*ORT)(nil)
)

// NewORT prepares a compiler. It starts one thread, from which all workers are started, and which
// Close ends. Workers die with that thread, and so with the calling process.
func NewORT(o ORTOptions) *ORT {
	if o.Worker == "" {
		// otherwise Worker stays empty, which the first job reports
		if self, err := os.Executable(); err == nil {
			o.Worker = filepath.Join(filepath.Dir(self), "epcached-ort")
		}
	}
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	var stacks int64
	if o.Limits.Memory == 0 {
		stacks = 4 * int64(runtime.NumCPU()) * cmp.Or(o.Limits.Stack, DefaultLimits.Stack)
	}
	o.Limits = o.Limits.orDefault()
	var left []os.DirEntry
	if o.Socket != "" {
		left, _ = os.ReadDir(o.Scratch) // if the directory does not exist yet, it has no entries
	}
	return &ORT{leftDirs: left, opts: o, stacks: stacks, startTimeout: 30 * time.Second,
		launcher: newLauncher(), host: newHost(o), tools: map[string]Tool{}}
}

// Close ends the thread that NewORT started. It waits for calls under way; cancel their contexts to
// hurry. Later calls fail.
func (o *ORT) Close() error {
	o.launcher.close()
	return nil
}

// Probe implements Compiler. Each EP library is loaded in a process of its own, so that one that
// crashes does not hide the others. For an EP without a library or without a device, it lists the
// device that the vendor's tool compiles for.
func (o *ORT) Probe(ctx context.Context, r Runtime) (Facts, error) {
	facts := Facts{ORTVersion: r.ORTVersion}
	for _, lib := range r.EPs {
		probe := EPProbe{Name: lib.EP, Library: lib.Path}
		if err := ctx.Err(); err != nil {
			return Facts{}, err
		}
		if o.loadable(r, EP{Name: lib.EP, Library: lib.Path}) {
			req := workerproto.Request{Do: workerproto.Probe, ORTLibrary: r.ORTLibrary,
				EPs: []EP{{Name: lib.EP, Library: lib.Path}}, Readable: lib.Files}
			done, err := o.scratchJob(ctx, req, Pace{}, nil)
			switch {
			case err == nil && len(done.EPs) == 1:
				facts.ORTVersion, facts.ORTBuild = done.ORTVersion, done.ORTBuild
				probe.Devices, probe.Error = done.EPs[0].Devices, done.EPs[0].Error
			case errors.As(err, new(*ExitError)), errors.Is(err, ErrTimeout):
				probe.Err, probe.Error = err, err.Error()
			case err != nil:
				return Facts{}, fmt.Errorf("probe %q: %w", r.Directory, err)
			default:
				return Facts{}, fmt.Errorf("probe %q: %w: worker answered for %d EPs", r.Directory,
					workerproto.ErrMalformed, len(done.EPs))
			}
		}
		if t, isTool := o.tools[lib.EP]; isTool && probe.Error == "" && len(probe.Devices) == 0 {
			probe.Devices = []DeviceFacts{t.device()}
		}
		facts.EPs = append(facts.EPs, probe)
	}
	return facts, nil
}

// Compile implements Compiler.
func (o *ORT) Compile(ctx context.Context, job Job, progress func(phase string)) (Result, error) {
	t, isTool, err := o.toolFor(job.EPs)
	if err == nil {
		err = job.check()
	}
	var req workerproto.Request
	switch {
	case err != nil:
	case isTool:
		job.Written = nil // because tools may write their files in any order
		req, err = t.compileRequest(job)
	default:
		req, err = compileRequest(job)
	}
	if err != nil {
		return Result{}, err
	}
	before, err := o.giveToWorker(job.Dir)
	if err != nil {
		return Result{}, err
	}
	writing := watchWriting(ctx, job, before, o.opts.Log)
	done, err := o.runWorker(ctx, req, job.Dir, job.Pace, progress)
	settled := writing.end()
	result := Result{Log: done.log, CPUSeconds: done.cpu}
	if err != nil {
		if isTool {
			err = fmt.Errorf("%q: %w", filepath.Base(job.Model), t.outputError(err, done.log))
		}
		return result, err
	}
	if !isTool {
		if before, err = o.keepFiles(ctx, job, before); err != nil {
			return result, err
		}
	}
	files, _, err := Collect(ctx, job.Dir, job.Outputs(), before, o.opts.Limits)
	if err != nil {
		if req.Route == RouteSessionOptions {
			err = noGraph(ctx, job, err)
		}
		var none *NoNodesError
		if errors.As(err, &none) {
			none.EPs, none.Errors, none.Log = epNames(job.EPs), done.Errors, done.log
		}
		return result, err
	}
	// All workers have ended: from here on no process of their user can change the output.
	own := &Credential{UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
	if err := o.chown(job.Dir, files, own); err != nil {
		return result, err
	}
	result.Graph, result.Graphs, result.Files = job.Output, job.Outputs(), files
	result.Seconds, result.Route, result.MaxRSS = done.Seconds, req.Route, done.PeakMemory
	result.Settled = settled && !job.Initializers.InSource && !IsWeightless(job.SessionOptions)
	if isTool {
		result.ORTVersion = job.Runtime.ORTVersion
		result.EPs = []EPUsed{{Name: t.EP, Devices: []DeviceFacts{t.device()}}}
		return result, nil
	}
	result.ORTVersion, result.EPs = done.ORTVersion, done.EPs
	return result, nil
}

// keepFiles copies source files beside the graphs, and returns their names, which are not output.
func (o *ORT) keepFiles(ctx context.Context, job Job, before []string) ([]string, error) {
	switch {
	case len(job.Share) > 0: // checkInitializers refuses the options of the next case
		return before, keepSharedSources(ctx, job, before, o.opts.Limits)
	case job.Initializers.InSource || IsWeightless(job.SessionOptions):
		return keepSources(ctx, job, before)
	}
	return before, nil
}

func (job Job) check() error {
	if !filepath.IsAbs(job.Model) || !filepath.IsAbs(job.Dir) {
		return fmt.Errorf("compile %q in %q: paths must be absolute", job.Model, job.Dir)
	}
	if job.Output == "" || job.Output != filepath.Base(job.Output) {
		return fmt.Errorf("compile %q: output %q is not a file name", job.Model, job.Output)
	}
	return nil
}

func compileRequest(job Job) (workerproto.Request, error) {
	eps, err := requestEPs(job.Runtime, job.EPs)
	if err != nil {
		return workerproto.Request{}, err
	}
	switch job.Route {
	case "":
		job.Route = RouteCompileAPI
		if len(job.Share) > 0 {
			// OpenVINO shares only among live sessions, and QNN's binary is not larger this way
			job.Route = RouteSessionOptions
		}
	case RouteCompileAPI, RouteSessionOptions:
	default:
		return workerproto.Request{},
			fmt.Errorf("compile %q: unknown route %q", job.Model, job.Route)
	}
	if err := job.checkInitializers(); err != nil {
		return workerproto.Request{}, fmt.Errorf("compile %q: %w", job.Model, err)
	}
	req := workerproto.Request{
		Do: workerproto.Compile, ORTLibrary: job.Runtime.ORTLibrary, EPs: eps, Model: job.Model,
		ModelFile: job.ModelFile, Output: filepath.Join(job.Dir, job.Output),
		Route: job.Route, Embed: job.Embed, Options: workerproto.Session(job.Session),
		Readable: readable(job.Runtime, eps), Keep: job.Initializers,
	}
	return req, shareRequest(job, &req)
}

func requestEPs(r Runtime, eps []EP) ([]EP, error) {
	if len(eps) == 0 {
		return nil, errors.New("no execution provider is named")
	}
	var list []EP
	for _, ep := range eps {
		if ep.Library == "" {
			lib, err := r.Library(ep.Name)
			if err != nil {
				return nil, err
			}
			ep.Library = lib.Path
		}
		if !filepath.IsAbs(ep.Library) {
			// ORT would look for it beside its own library
			return nil, fmt.Errorf("library %q of %s: not an absolute path", ep.Library, ep.Name)
		}
		if info, ok := EPByName(ep.Name); ok {
			ep.Options = info.Resolve(ep.Library, ep.Options)
		}
		list = append(list, ep)
	}
	return list, nil
}

func librariesOf(eps []EP) (paths string) {
	for _, ep := range eps {
		paths += ep.Library + "\n"
	}
	return paths
}

func epNames(eps []EP) []string {
	var names []string
	for _, ep := range eps {
		names = append(names, ep.Name)
	}
	return names
}

// Compatibility implements Compiler. An EP that gives no verdicts for its devices here answers
// Unknown.
func (o *ORT) Compatibility(ctx context.Context, r Runtime, ep EP,
	infos []string) ([]Verdict, error) {
	if len(infos) == 0 {
		return nil, nil
	}
	if !o.loadable(r, ep) { // only the library could answer
		return make([]Verdict, len(infos)), ctx.Err()
	}
	eps, err := requestEPs(r, []EP{ep})
	if err != nil {
		return nil, err
	}
	done, err := o.scratchJob(ctx, workerproto.Request{Do: workerproto.Compatibility,
		ORTLibrary: r.ORTLibrary, EPs: eps, Infos: infos, Readable: readable(r, eps)}, Pace{}, nil)
	if err != nil {
		return nil, fmt.Errorf("compatibility with %s: %w", ep.Name, err)
	}
	if len(done.Verdicts) != len(infos) {
		return nil, fmt.Errorf("compatibility with %s: %w: %d verdicts for %d strings", ep.Name,
			workerproto.ErrMalformed, len(done.Verdicts), len(infos))
	}
	var verdicts []Verdict
	for _, v := range done.Verdicts {
		if v < int(Unknown) || v > int(Unsupported) {
			v = int(Unknown) // a later ORT may have more verdicts; unknown is always safe
		}
		verdicts = append(verdicts, Verdict(v))
	}
	return verdicts, nil
}

type answer struct {
	workerproto.Result
	log    string
	before int64   // bytes when its EPs were registered
	cpu    float64 // seconds of all processors, also of a worker that failed
}

func (o *ORT) scratchJob(ctx context.Context, req workerproto.Request, pace Pace,
	progress func(string)) (answer, error) {
	dir, err := o.scratch()
	if err != nil {
		return answer{}, err
	}
	defer o.removeScratch(dir)
	return o.runWorker(ctx, req, dir, pace, progress)
}

func (o *ORT) scratch() (string, error) {
	dir, err := os.MkdirTemp(o.opts.Scratch, "epcached-ort-")
	if err != nil {
		return "", fmt.Errorf("scratch directory: %w", err)
	}
	if _, err := o.giveToWorker(dir); err != nil {
		o.removeScratch(dir)
		return "", err
	}
	return dir, nil
}

// removeScratch removes a scratch directory. A failure costs only temporary space.
func (o *ORT) removeScratch(dir string) {
	err := os.RemoveAll(dir)
	// perhaps directories of the workers' user
	if errors.Is(err, fs.ErrPermission) && o.opts.Socket != "" {
		if err = o.releaseDir(dir); err == nil {
			err = os.RemoveAll(dir)
		}
	}
	if err != nil {
		o.opts.Log.Warn("cannot remove a scratch directory", "directory", dir, "error", err)
	}
}

func (o *ORT) giveToWorker(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("job's directory: %w", err)
	}
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, o.chown(dir, names, o.opts.User)
}

// chown gives the directory and those names in it to the workers' user, or back to the daemon's.
// With a unit, the workers' group may write there, or only the daemon may reach it: files that
// workers leave stay their user's, and the store copies them.
func (o *ORT) chown(dir string, names []string, to *Credential) error {
	unit := o.opts.Socket != ""
	switch {
	case o.opts.User == nil:
		return nil
	case unit && to != o.opts.User:
		return os.Chmod(dir, 0o700)
	}
	for _, name := range append([]string{"."}, names...) {
		path := filepath.Join(dir, name)
		if unit {
			if err := o.share(path, 0o070); err != nil {
				return err
			}
		} else if err := os.Lchown(path, int(to.UID), int(to.GID)); err != nil {
			return fmt.Errorf("job's directory: %w", err)
		}
	}
	return nil
}
