package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// workerVariable names the worker program that compiles under a claim. Without it that is epcached-ort beside this program.
const workerVariable = "EPCACHE_WORKER"

// giveUpTime is how long the daemon is waited for when a claim is given up; it ends with the connection in any case.
const giveUpTime = 2 * time.Second

// maxBeside is how many libraries beside an execution provider's own the daemon takes.
const maxBeside = 512

// library matches shared libraries' names.
var library = regexp.MustCompile(`\.so(\.\d+)*$`)

// claimant compiles under claims, in worker processes of this program's own, with the libraries in a folder that the daemon
// need not know.
type claimant struct {
	runtime compilers.Runtime
	worker  *compilers.ORT
	places  chan struct{} // a token for each compile that runs
}

func newClaimant(dir string) (*claimant, error) {
	rt, err := compilers.Find(dir)
	if err != nil {
		return nil, err
	}
	worker := compilers.NewORT(compilers.ORTOptions{Worker: os.Getenv(workerVariable)})
	return &claimant{runtime: rt, worker: worker, places: make(chan struct{}, runtime.NumCPU())}, nil
}

func (cl *claimant) close() error { return cl.worker.Close() }

// show adds to a request what the claim is to be for: the libraries, and those beside them, which tell one SDK from
// another. The files are opened here and are the caller's to close, like those that it gave.
func (cl *claimant) show(a *wire.Acquire, files []*os.File) ([]*os.File, error) {
	a.Runtime.OrtVersion, a.Runtime.OrtLibrary = cl.runtime.ORTVersion, cl.runtime.ORTLibrary
	for _, ep := range a.Eps {
		lib, err := cl.runtime.Library(ep.Name)
		if err != nil {
			return files, err
		}
		shown := &wire.EpLibrary{Ep: ep.Name, Path: lib.Path}
		f, err := openRegular(lib.Path)
		if err != nil {
			return files, fmt.Errorf("library %q: %w", lib.Path, err)
		}
		shown.Fd, files = new(uint32), append(files, f)
		*shown.Fd = uint32(len(files) - 1)
		beside, err := neighbours(lib.Path)
		if err != nil {
			return files, err
		}
		for _, name := range beside {
			if f, err = openRegular(filepath.Join(filepath.Dir(lib.Path), name)); err != nil {
				return files, fmt.Errorf("library %q: %w", name, err)
			}
			files = append(files, f)
			shown.Beside = append(shown.Beside, &wire.ExternalFile{Location: name, Fd: uint32(len(files) - 1)})
		}
		a.Runtime.EpLibraries = append(a.Runtime.EpLibraries, shown)
	}
	return files, nil
}

// neighbours lists the other libraries in a library's folder; none where there are too many: then it is known by its path. The
// clients in other languages take the same ones, so that they are served each other's builds.
func neighbours(path string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	own, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if !e.Type().IsRegular() || !library.MatchString(e.Name()) { // a link inside the folder is another name for what is found anyway
			continue
		}
		info, err := e.Info()
		if err != nil {
			return nil, err
		}
		if !os.SameFile(info, own) {
			names = append(names, e.Name())
		}
	}
	if len(names) > maxBeside {
		return nil, nil
	}
	return names, nil
}

// work compiles what a claim is for, and puts it. What fails is told to the daemon, so that the next who waits may try.
func (cl *claimant) work(ctx context.Context, c *unixsock.Client, m *modelFile, r *request, claimed *wire.AcquireReply, progress func(*wire.Progress)) (*wire.AcquireReply, *os.File, error) {
	cl.places <- struct{}{}
	defer func() { <-cl.places }()
	folder, err := os.MkdirTemp("", "epcachectl-claim-")
	if err != nil {
		return nil, nil, errors.Join(err, giveUp(ctx, c, claimed.GetClaim(), err))
	}
	defer os.RemoveAll(folder) // what stays is in a temporary folder
	result, err := cl.compile(ctx, folder, m, r, claimed, progress)
	if err != nil {
		return nil, nil, errors.Join(err, giveUp(ctx, c, claimed.GetClaim(), err))
	}
	// What is refused has ended the claim.
	return put(ctx, c, folder, result, claimed.GetClaim(), progress)
}

func (cl *claimant) compile(ctx context.Context, folder string, m *modelFile, r *request, claimed *wire.AcquireReply, progress func(*wire.Progress)) (compilers.Result, error) {
	claim := claimed.GetClaim()
	if !filepath.IsLocal(claim.GetOutput()) {
		return compilers.Result{}, fmt.Errorf("the daemon wants the graph to be called %q", claim.GetOutput())
	}
	if limit := claim.GetDeadlineMs(); limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, milliseconds(limit))
		defer cancel()
	}
	model, err := filepath.Abs(m.path)
	if err != nil {
		return compilers.Result{}, err
	}
	start := time.Now()
	result, err := cl.worker.Compile(ctx, cl.job(folder, model, r, claimed), func(phase string) {
		progress(&wire.Progress{Phase: "compiling", Detail: phase, ElapsedMs: time.Since(start).Milliseconds()})
	})
	if err == nil {
		err = m.unchanged()
	}
	return result, err
}

// job is what was asked for, as the daemon would compile it.
func (cl *claimant) job(folder, model string, r *request, claimed *wire.AcquireReply) compilers.Job {
	claim := claimed.GetClaim()
	job := compilers.Job{
		Runtime: cl.runtime, Model: model, Folder: folder, Output: claim.GetOutput(), Route: claim.GetRoute(), Embed: r.embed,
		SessionOptions: claimed.GetSessionOptions(), FreeDimensions: r.dims, FreeDimensionsByDenotation: r.denotations,
		GraphOptimizationLevel: claimed.GetGraphOptimizationLevel(),
		Initializers: compilers.Initializers{File: r.output.GetExternalInitializersFile(), Threshold: r.output.GetExternalInitializersThreshold(),
			InSource: r.output.GetKeepInitializersInSource()},
	}
	for _, ep := range r.eps {
		one := compilers.EP{Name: ep.GetName(), Options: ep.GetOptions()}
		for _, d := range ep.GetDevices() {
			one.Devices = append(one.Devices, compilers.Device{Type: d.GetType(), VendorID: d.GetVendorId(), DeviceID: d.GetDeviceId(), Metadata: d.GetMetadata()})
		}
		job.EPs = append(job.EPs, one)
	}
	return job
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		f.Close() // only read from
	}
}

func put(ctx context.Context, c *unixsock.Client, folder string, made compilers.Result, claim *wire.Claim, progress func(*wire.Progress)) (*wire.AcquireReply, *os.File, error) {
	request := &wire.Put{Claim: claim.GetId(), Graphs: 1, CompileSeconds: made.Seconds, OrtVersion: made.ORTVersion}
	var files []*os.File
	defer func() { closeFiles(files) }()
	for i, name := range made.Files {
		f, err := openRegular(filepath.Join(folder, name))
		if err != nil {
			err = fmt.Errorf("%q: %w", name, err)
			return nil, nil, errors.Join(err, giveUp(ctx, c, claim, err))
		}
		files = append(files, f)
		request.Files = append(request.Files, &wire.PutFile{Name: filepath.ToSlash(name), Fd: uint32(i)})
	}
	for _, ep := range made.EPs {
		request.MadeBy = append(request.MadeBy, &wire.MadeBy{Ep: ep.Name, Version: ep.Version})
	}
	return c.Put(ctx, request, files, progress)
}

// giveUp passes on what the compiler said. It gives the error of telling the daemon, unless that has gone: the claim went with it.
func giveUp(ctx context.Context, c *unixsock.Client, claim *wire.Claim, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveUpTime)
	defer cancel()
	told := &wire.GiveUp{Claim: claim.GetId(), Text: cause.Error()}
	var refused *compilers.RefusedError
	if errors.As(cause, &refused) && refused.Code > 0 {
		told.Code = int32(refused.Code)
	}
	_, err := c.GiveUp(ctx, told)
	if errors.Is(err, unixsock.ErrNotFound) || errors.Is(err, unixsock.ErrConnectionLost) || errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
}

// unchanged tells whether the model's files are still those that the daemon was shown: it can only take this program's word.
func (m *modelFile) unchanged() error {
	for path, then := range m.shown {
		now, err := os.Stat(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err != nil || !os.SameFile(then, now) || then.Size() != now.Size() || !then.ModTime().Equal(now.ModTime()) {
			return fmt.Errorf("%q changed while it was compiled", path)
		}
	}
	return nil
}
