package acquire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// WorkerVariable is the environment variable with the path of the worker for compiles under a
// claim. The default is epcached-ort beside this program.
const WorkerVariable = "EPCACHE_WORKER"

// giveUpTimeout bounds the call that gives up a claim, which ends with the connection in any case.
const giveUpTimeout = 2 * time.Second

// maxLibrariesBeside is how many libraries beside an execution provider's own the daemon accepts.
const maxLibrariesBeside = 512

// claimant compiles under claims, in workers of this program with its own libraries.
type claimant struct {
	runtime    compilers.Runtime
	worker     Worker
	placements chan struct{} // bounds the concurrent compiles
}

// Worker is the part of a compiler that claims use.
type Worker interface {
	Compile(ctx context.Context, job compilers.Job, progress func(string)) (compilers.Result, error)
	Close() error
}

// NewWorker makes the worker; tests replace it.
var NewWorker = func() Worker {
	return compilers.NewORT(compilers.ORTOptions{Worker: os.Getenv(WorkerVariable)})
}

func newClaimant(r *Request) (*claimant, error) {
	rt, err := compilers.Find(r.Runtime)
	if err != nil {
		return nil, err
	}
	for _, ep := range r.EPs {
		if _, err := rt.Library(ep.Name); err != nil {
			return nil, err
		}
	}
	return &claimant{runtime: rt, worker: NewWorker(),
		placements: make(chan struct{}, runtime.NumCPU())}, nil
}

// showLibraries adds the libraries of --runtime to a request. A daemon of another user compares
// their content with its own libraries, and otherwise identifies builds under a claim by it. The
// caller closes the returned files, which include those it passed. Without such libraries the
// daemon reports the error.
func showLibraries(a *wire.Acquire, files []*os.File) ([]*os.File, error) {
	rt, err := compilers.Find(a.Runtime.Directory)
	if err != nil {
		return files, nil
	}
	a.Runtime.OrtVersion, a.Runtime.OrtLibrary = rt.ORTVersion, rt.ORTLibrary
	open := func(path string) (uint32, error) {
		f, err := modelfile.OpenRegular(path)
		if err != nil {
			return 0, fmt.Errorf("library %q: %w", path, err)
		}
		files = append(files, f)
		return uint32(len(files) - 1), nil
	}
	for _, ep := range a.Eps {
		lib, err := rt.Library(ep.Name)
		if err != nil {
			continue
		}
		shown := &wire.EpLibrary{Ep: ep.Name, Path: lib.Path, Fd: new(uint32)}
		if *shown.Fd, err = open(lib.Path); err != nil {
			return files, err
		}
		// otherwise it is identified by its path too
		if beside := compilers.LibrariesBeside(lib.Path); len(beside) <= maxLibrariesBeside {
			shown.Complete = true
			for _, name := range beside {
				one := &wire.ExternalFile{Location: name}
				if one.Fd, err = open(filepath.Join(filepath.Dir(lib.Path), name)); err != nil {
					return files, err
				}
				shown.Beside = append(shown.Beside, one)
			}
		}
		a.Runtime.EpLibraries = append(a.Runtime.EpLibraries, shown)
	}
	return files, nil
}

// alternatives lists what a daemon without the libraries proposes, best first: show, claim, own.
func alternatives(err error) []string {
	if !errors.Is(err, unixsock.ErrUnavailable) {
		return nil
	}
	return strings.Fields(factOf(err, "instead"))
}

// work compiles the model of the claim in r, and puts the result. It reports a failure to the
// daemon, so that the next waiter may try. If the store has no space for the result, and the call
// only needs copies of its files, they stay in the directory r.own, and the reply in r describes
// them.
func (cl *claimant) work(ctx context.Context, c *unixsock.Client, m *modelfile.Model, g *Get,
	r *modelResult, progress func(*wire.Progress)) error {
	claimed, claim := r.reply, r.reply.GetClaim()
	r.reply = nil
	cl.placements <- struct{}{}
	defer func() { <-cl.placements }()
	above, err := os.MkdirTemp("", "epcachectl-claim-")
	defer func() {
		if r.ownDaemon == "" {
			os.RemoveAll(above) // best effort: it is a temporary directory
		}
	}()
	dir := filepath.Join(above, "out")
	if err == nil {
		err = os.Mkdir(dir, 0o700)
	}
	var made compilers.Result
	if err == nil {
		made, err = cl.compile(ctx, dir, m, &g.Request, claimed, progress)
	}
	if err != nil {
		return errors.Join(err, giveUp(ctx, c, claim, err))
	}
	// The claim has ended if the daemon refused the files themselves.
	r.reply, r.view, err = put(ctx, c, dir, made, claim, progress)
	if !g.copies() || !errors.Is(err, unixsock.ErrNoSpace) {
		return err
	}
	why := "not stored: " + err.Error()
	_ = giveUp(ctx, c, claim, err) // the claim ends with the connection in any case
	// Replaces the daemon's answer, without a view.
	reply := &wire.AcquireReply{Outcome: "put", RequestKey: claimed.GetRequestKey(),
		ModelDigest: claimed.GetModelDigest(), Ep: g.Request.EPs[0].GetName(),
		Graph: filepath.ToSlash(made.Graph), ProviderOptions: claimed.GetProviderOptions(),
		SessionOptions:         claimed.GetSessionOptions(),
		GraphOptimizationLevel: claimed.GetGraphOptimizationLevel(), CompileSeconds: made.Seconds,
		Unkept: true, Why: why, Warnings: []string{why}}
	r.blobs = make(map[string]func() (io.ReadCloser, error))
	for _, name := range made.Files {
		open := func() (*os.File, error) { return modelfile.OpenRegular(filepath.Join(dir, name)) }
		f, err := describeFile(ctx, open)
		if err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
		f.Name = filepath.ToSlash(name)
		reply.Files = append(reply.Files, f)
		r.blobs[f.Name] = func() (io.ReadCloser, error) { return open() }
	}
	r.reply, r.ownDaemon = reply, above
	return nil
}

// describeFile returns the size and the digest of a file.
func describeFile(ctx context.Context, open func() (*os.File, error)) (*wire.File, error) {
	f, err := open()
	if err != nil {
		return nil, err
	}
	defer f.Close() // opened for reading
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	digest, err := cas.Sum(ctx, f, 0, info.Size())
	return &wire.File{Size: info.Size(), Digest: digest.String()}, err
}

func (cl *claimant) compile(ctx context.Context, dir string, m *modelfile.Model, r *Request,
	claimed *wire.AcquireReply, progress func(*wire.Progress)) (compilers.Result, error) {
	claim := claimed.GetClaim()
	if !filepath.IsLocal(claim.GetOutput()) {
		return compilers.Result{}, fmt.Errorf("the graph must have the name %q", claim.GetOutput())
	}
	if limit := claim.GetDeadlineMs(); limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, term.Milliseconds(limit))
		defer cancel()
	}
	model, err := m.Linked(dir, claim.GetOutput())
	if err != nil {
		return compilers.Result{}, err
	}
	start := time.Now()
	result, err := cl.worker.Compile(ctx, cl.job(dir, model, r, claimed), func(phase string) {
		progress(&wire.Progress{Phase: "compiling", Detail: phase,
			ElapsedMs: time.Since(start).Milliseconds()})
	})
	if err == nil {
		err = m.Unchanged()
	}
	return result, err
}

func (cl *claimant) job(dir, model string, r *Request, claimed *wire.AcquireReply) compilers.Job {
	claim := claimed.GetClaim()
	job := compilers.Job{
		Runtime: cl.runtime, Model: model, Dir: dir, Output: claim.GetOutput(),
		Route: claim.GetRoute(), Embed: r.embed,
		Session: compilers.Session{SessionOptions: claimed.GetSessionOptions(),
			FreeDimensions:             r.dims,
			FreeDimensionsByDenotation: r.Denotations,
			GraphOptimizationLevel:     claimed.GetGraphOptimizationLevel()},
		Initializers: compilers.Initializers{File: r.output.GetExternalInitializersFile(),
			Threshold: r.output.GetExternalInitializersThreshold(),
			InSource:  r.output.GetKeepInitializersInSource()},
	}
	for _, ep := range r.EPs {
		one := compilers.EP{Name: ep.GetName(), Options: ep.GetOptions()}
		for _, d := range ep.GetDevices() {
			one.Devices = append(one.Devices, compilers.Device{Type: d.GetType(),
				VendorID: d.GetVendorId(), DeviceID: d.GetDeviceId(), Metadata: d.GetMetadata()})
		}
		job.EPs = append(job.EPs, one)
	}
	return job
}

func put(ctx context.Context, c *unixsock.Client, dir string, made compilers.Result,
	claim *wire.Claim, progress func(*wire.Progress)) (*wire.AcquireReply, *os.File, error) {
	request := &wire.Put{Claim: claim.GetId(), Graphs: 1, CompileSeconds: made.Seconds,
		OrtVersion: made.ORTVersion}
	var files []*os.File
	defer func() { modelfile.CloseFiles(files) }()
	for i, name := range made.Files {
		f, err := modelfile.OpenRegular(filepath.Join(dir, name))
		if err != nil {
			err = fmt.Errorf("%q: %w", name, err)
			return nil, nil, errors.Join(err, giveUp(ctx, c, claim, err))
		}
		files = append(files, f)
		request.Files = append(request.Files,
			&wire.PutFile{Name: filepath.ToSlash(name), Fd: uint32(i)})
	}
	for _, ep := range made.EPs {
		request.MadeBy = append(request.MadeBy, &wire.MadeBy{Ep: ep.Name, Version: ep.Version})
	}
	return c.Put(ctx, request, files, progress)
}

// giveUp ends the claim with the compiler's error. It returns the error of that call, unless the
// daemon has ended, and the claim with it.
func giveUp(ctx context.Context, c *unixsock.Client, claim *wire.Claim, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveUpTimeout)
	defer cancel()
	giveUp := &wire.GiveUp{Claim: claim.GetId(), Text: cause.Error()}
	if refused, is := errors.AsType[*compilers.RefusedError](cause); is && refused.Code > 0 {
		giveUp.Code = int32(refused.Code)
	}
	_, err := unixsock.Ask[wire.GiveUpReply](ctx, c, giveUp, nil)
	if errors.Is(err, unixsock.ErrNotFound) || errors.Is(err, unixsock.ErrConnectionLost) ||
		errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
}
