package claims

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/internal/filestamp"
	"github.com/epcached/epcached/internal/sparse"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/store"
)

// Put is the artefact that a claimant submits. The caller closes the files.
type Put struct {
	Claim          string
	Files          []PutFile // the graph first
	Graphs         int       // how many of the files are graphs; 0: one
	CompileSeconds float64
	ORTVersion     string
	MadeBy         []MadeBy // in the order of the request's execution providers
}

// PutFile is one file, opened for reading only, and its name in the artefact.
type PutFile struct {
	Name string
	File *os.File
}

// MadeBy is an execution provider as its library describes it.
type MadeBy struct {
	EP, Version string
}

// Put stores the artefact that was compiled under a claim: it copies, checks and publishes the
// files, which it does not trust. When it returns, the build is durable, and all requests that
// waited for the claim have it. A refused artefact ends the claim.
func (cs *Claims) Put(ctx context.Context, p request.Peer, put *Put,
	progress func(request.Progress)) (*request.Answer, error) {
	t := jobs.NewProgressReporter(progress, cs.Now())
	defer t.End()
	cl, err := cs.find(p, put.Claim)
	if err != nil {
		return nil, err
	}
	if !cl.changeState(claimGranted, claimPutting) {
		if _, err := cs.find(p, put.Claim); err != nil {
			return nil, err // the claim ended just now
		}
		return nil, apierr.New(apierr.Busy, nil, "claim %.80q: its build is being submitted "+
			"already", put.Claim)
	}
	result, err := cs.storePut(ctx, cl, put, t.Phase)
	if err != nil {
		return nil, cl.putFailed(ctx, err)
	}
	// Otherwise the collector could remove it between the end of the job and the answer.
	done, err := cs.Store.BeginServing(result.Build.ID)
	if err != nil {
		return nil, request.UnservableError(err, cl.Name, "put")
	}
	defer done()
	// Take the lease before the others are notified, because one of them that may not use this
	// build compiles one that replaces it.
	a, err := lookup.Lease(context.WithoutCancel(ctx), cs.Store, result.Build, t.Phase)
	cl.deliver(result)
	// After this no request can join the ended job; new requests find the build.
	<-cl.job.Done()
	if err != nil {
		return nil, request.UnservableError(err, cl.Name, "put")
	}
	if !cl.KeepsView { // KeepsView was set in the claim's request, which this answers
		cs.Store.Views().NotePathGiven(a.LeasedView)
	}
	a.Outcome, a.Why = request.Taken, "submitted by you"
	own := judge.Judgement{Verdict: compilers.Optimal, Source: judge.SourcePut,
		Reason: request.PutBy(result.Build), At: cs.Now()}
	a.Compatibility = own.Doubted(result.Build)
	return cs.Lookup.FillAnswer(a, cl.WithRuntime(cl.Plan.EPs[0].Library, cl.Content)), nil
}

// putFailed ends the claim, unless a retry may succeed.
func (cl *claim) putFailed(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		err = request.ContextError(ctx, cl.Name)
	}
	class := apierr.ClassOf(err)
	if ctx.Err() != nil || class == apierr.NoSpace || class == apierr.Busy {
		if !cl.changeState(claimPutting, claimGranted) {
			cl.changeState(claimStoring, claimGranted)
		}
	} else {
		cl.endIfStateAtMost(claimStoring, "the submitted build is refused: "+err.Error(), 0)
	}
	// The claim may have ended in the meantime.
	if why := cl.endReason(); why != "" && !strings.Contains(why, err.Error()) {
		return apierr.New(class, err, "claim %s: %s", cl.ID, why)
	}
	return err
}

// storePut copies, checks and stores the artefact.
func (cs *Claims) storePut(ctx context.Context, cl *claim, put *Put, phase func(string)) (
	*jobs.Result, error) {
	phase("queued")
	lasting, end := cl.contextOf(ctx)
	defer end()
	leave, err := cs.Puts.Lock(lasting, cl.owner)
	if err != nil && ctx.Err() == nil {
		return nil, apierr.New(apierr.NotFound, nil, "the claim is over")
	} else if err != nil {
		return nil, err
	}
	defer leave()
	names, sizes, err := checkPut(cl, put)
	if err != nil {
		return nil, err
	}
	reservation, err := cs.reservePut(ctx, cl, sizes)
	if err != nil {
		return nil, err
	}
	defer reservation.Release()
	dir, remove, err := cs.Store.Stage("put-")
	if err != nil {
		return nil, request.StoreError(err, cl.Name)
	}
	defer remove()
	// At most as long as the claim has lasted, because the time that hits save is computed from it.
	seconds := time.Since(cl.began).Seconds()
	if stated := put.CompileSeconds; stated >= 0 && stated < seconds {
		seconds = stated
	}
	phase("reading")
	hashed, blobs := make(map[string]cas.Hashed, len(put.Files)), cs.Store.Blobs()
	for i, f := range put.Files {
		to := filepath.Join(dir, filepath.FromSlash(f.Name))
		if hashed[f.Name], err = copyPut(lasting, blobs, f, sizes[i], to); ctx.Err() != nil {
			return nil, ctx.Err()
		} else if err != nil {
			return nil, putError(err, cl.Name, f.Name)
		}
	}
	phase("checking")
	b, err := cs.examinePut(ctx, cl, put, dir, names)
	if err != nil {
		return nil, err
	}
	b.CompileSeconds = seconds
	if !cl.changeState(claimPutting, claimStoring) {
		return nil, apierr.New(apierr.NotFound, nil, "claim %s is over", cl.ID)
	}
	phase("storing")
	hold := blobs.Hold()
	defer cs.Store.Packing().Release(hold)
	err = cs.Store.Publish(ctx, store.Publication{Build: b, Dir: dir, Hashed: hashed,
		UID: cl.Peer.UID, Reservation: reservation, Kind: event.Put,
		Text: request.PutDescription(b), Counter: "puts"}, hold)
	if err != nil {
		return nil, request.StoreError(err, b.ModelName)
	}
	return &jobs.Result{Build: b}, nil
}

// reservePut checks the user's quota and reserves space for the artefact. The error says with
// numbers why it does not fit. The caller releases the reservation.
func (cs *Claims) reservePut(ctx context.Context, cl *claim, sizes []int64) (
	*store.Reservation, error) {
	total, err := cs.CheckPutQuota(ctx, cl.owner, cl.Name, sizes)
	if err != nil {
		return nil, err
	}
	if cl.source != nil { // the graph may get its interface
		sizes = append(slices.Clone(sizes), cl.source.Size)
	}
	reservation, err := cs.Store.Reserve(ctx, cl.Peer.UID, true, sizes...)
	if e, is := errors.AsType[*apierr.Error](err); is {
		said := apierr.New(e.Class, nil, "model %q: %s", cl.Name, e.Text).WithHint("%s", e.Hint)
		said.Err = e.Err
		return nil, said
	}
	if err != nil {
		return nil, request.StoreError(err, cl.Name)
	}
	free, err := cas.FreeBytes(cs.Store.Directory())
	if err == nil {
		err = store.Fits("the artefact", total, free)
	}
	if err != nil {
		reservation.Release()
		return nil, request.StoreError(err, cl.Name)
	}
	return reservation, nil
}

// CheckPutQuota fails if files of these sizes would exceed the user's quota for puts and
// conversions. It returns the sum of sizes.
func (cs *Claims) CheckPutQuota(ctx context.Context, owner uint32, model string, sizes []int64) (
	total int64, err error) {
	most := cs.limits().UserBytes
	users, err := cs.Store.Index().Users(ctx)
	if err != nil {
		return 0, apierr.New(apierr.Internal, err, "builds submitted by uid %d", owner)
	}
	var used int64
	for uid, u := range users {
		if cs.Owner(uid) == owner {
			used += u.PutBytes
		}
	}
	if _, total = store.SpaceOf(sizes...); total > most-used {
		return total, apierr.New(apierr.NoSpace, nil, "model %q: %s, and builds submitted by "+
			"uid %d take %s of at most %s",
			model, bytesize.Text(total), owner, bytesize.Text(used), bytesize.Text(most)).
			WithHint("remove builds that are not needed: epcachectl rm")
	}
	return total, nil
}

// checkPut checks the announced names and sizes before a byte is read.
func checkPut(cl *claim, put *Put) (names []string, sizes []int64, err error) {
	switch {
	case put.Graphs > 1:
		return nil, nil, badPut(cl, "%d graphs, and the claim is for one model", put.Graphs)
	case len(put.Files) > 0 && put.Files[0].Name != cl.Output:
		return nil, nil, badPut(cl, "the graph is called %.80q, not %q",
			put.Files[0].Name, cl.Output)
	}
	return checkPutFiles(cl, put.Files)
}

func badPut(cl *claim, format string, args ...any) error {
	return apierr.New(apierr.BadRequest, nil, "model %q: submitted build: %s", cl.Name,
		fmt.Sprintf(format, args...))
}

// checkPutFiles checks the names, descriptors and sizes of the files.
func checkPutFiles(cl *claim, files []PutFile) (names []string, sizes []int64, err error) {
	var total int64
	bad := func(format string, args ...any) error { return badPut(cl, format, args...) }
	if len(files) == 0 || len(files) > portable.MaxFiles {
		return nil, nil, bad("%d files, not 1 to %d", len(files), portable.MaxFiles)
	}
	most := cl.claims.limits().Bytes
	seen := make(map[string]bool)
	for _, f := range files {
		if why := portable.BadName(f.Name); why != "" {
			return nil, nil, bad("file %.80q: %s", f.Name, why)
		}
		if seen[f.Name] {
			return nil, nil, bad("file %q is listed twice", f.Name)
		}
		seen[f.Name] = true
		if err := refuseWritable(f.File); err != nil {
			return nil, nil, bad("file %q: %v", f.Name, err)
		}
		info, err := f.File.Stat()
		if err != nil {
			return nil, nil, bad("file %q: %v", f.Name, err)
		}
		if info.Size() > most-total {
			return nil, nil, bad("file %q: %s; all files together may have %s", f.Name,
				bytesize.Text(info.Size()), bytesize.Text(most))
		}
		total += info.Size()
		names, sizes = append(names, f.Name), append(sizes, info.Size())
	}
	return names, sizes, nil
}

// copyPut copies size bytes, which the file had when it was announced. It fails with
// io.ErrUnexpectedEOF if the file changes during the copy.
func copyPut(ctx context.Context, blobs *cas.Store, f PutFile, size int64, to string) (
	cas.Hashed, error) {
	before, err := stampWrittenBack(f.File)
	if err != nil {
		return cas.Hashed{}, err
	}
	if before.Size != size { // the reservation is for size bytes
		return cas.Hashed{}, io.ErrUnexpectedEOF
	}
	hashed, err := stagePut(ctx, blobs, &contextReader{ctx, f.File}, f.File, to, size)
	if err != nil {
		return hashed, err
	}
	after, err := stampWrittenBack(f.File)
	if err == nil && before != after {
		err = io.ErrUnexpectedEOF
	}
	return hashed, err
}

// putError returns the error for a file that could not be copied.
func putError(err error, model, file string) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return apierr.New(apierr.BadRequest, nil,
			"model %q: submitted build: file %q changed while it was read", model, file).
			WithHint("submit it when it is complete")
	}
	return request.StoreError(fmt.Errorf("file %q: %w", file, err), model)
}

// contextReader reads until its context ends.
type contextReader struct {
	ctx  context.Context
	file *os.File
}

func (r *contextReader) ReadAt(p []byte, off int64) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.file.ReadAt(p, off)
}

// Adopt stores the request's own compiled model as a build, in one job for all requests at the same
// time. The caller calls done when it has leased the build. If done is nil there is no build, and
// err or why has the reason.
func (cs *Claims) Adopt(ctx context.Context, at *request.Attempt) (
	done func(), why string, err error) {
	key, err := cs.key(at)
	if err != nil {
		return nil, "the request asks to store nothing", nil
	}
	begin := func() (jobs.Work, error) { return cs.newAdoption(at, key) }
	result, _, err := cs.Jobs.Join(ctx, key, at.Caller(cs.Owner), begin)
	switch {
	case ctx.Err() != nil:
		return nil, "", request.ContextError(ctx, at.Name)
	case err != nil:
		return nil, err.Error(), nil
	}
	return func() { cs.Store.TakerDone(result.Build.ID) }, "", nil
}

// newAdoption returns the work that stores a user's compiled model as a build: a claim with its
// put.
func (cs *Claims) newAdoption(at *request.Attempt, key jobs.Key) (jobs.Work, error) {
	files, err := at.WithOwnFiles()
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "model %q", at.Name)
	}
	if files.Runtime, err = keepLibraries(&at.Runtime, false); err != nil {
		files.Close()
		return nil, apierr.New(apierr.Internal, err, "model %q", at.Name)
	}
	at = at.WithRequest(files)
	about := at.JobAbout(key.Scope, "adopted: compiled outside epcached")
	about.Keeps = true
	put := &Put{Files: []PutFile{{Name: at.Plan.OutputName(), File: files.Graph}}}
	for _, name := range slices.Sorted(maps.Keys(files.External)) {
		put.Files = append(put.Files, PutFile{Name: name, File: files.External[name]})
	}
	cl := &claim{Claim: request.Claim{Output: at.Plan.OutputName()}, adopts: true,
		state: claimPutting, claims: cs, scope: key.Scope, Attempt: at,
		owner: cs.Owner(at.Peer.UID), began: time.Now(), duration: context.Background()}
	do := func(ctx context.Context, j *jobs.Job) (_ *jobs.Result, err error) {
		defer files.Close()
		if cl.source, err = readInterface(ctx, files); err != nil {
			return nil, err
		}
		cl.job = j
		return cs.storePut(ctx, cl, put, j.SetPhase)
	}
	return jobs.Func{Work: about, Do: do}, nil
}

// refuseWritable refuses a descriptor through which its sender could still write. It must be opened
// for reading only, or be a sealed memory file.
func refuseWritable(f *os.File) error {
	fd := f.Fd()
	flags, err := unix.FcntlInt(fd, unix.F_GETFL, 0)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(fd), &st); err != nil {
		return err
	}
	switch {
	case flags&unix.O_PATH != 0 || flags&unix.O_ACCMODE == unix.O_WRONLY:
		return errors.New("not opened for reading")
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return errors.New("not a regular file")
	case flags&unix.O_ACCMODE == unix.O_RDONLY:
		return nil
	}
	const sealed = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	if seals, err := unix.FcntlInt(fd, unix.F_GET_SEALS, 0); err != nil || seals&sealed != sealed {
		return errors.New("opened for writing: open it for reading only, or seal it")
	}
	return nil
}

// stampWrittenBack writes back stores through mappings, which change the stamp, and returns the
// file's stamp.
func stampWrittenBack(f *os.File) (cas.Stamp, error) {
	if err := filestamp.WriteBack(f); err != nil {
		return cas.Stamp{}, &os.PathError{Op: "fdatasync", Path: f.Name(), Err: err}
	}
	return cas.StampOf(f)
}

// stagePut copies a client's file, size bytes read through from, into a new private file. It hashes
// the bytes on the way, unless the file has holes.
func stagePut(ctx context.Context, blobs *cas.Store, from io.ReaderAt, file *os.File, path string,
	size int64) (cas.Hashed, error) {
	if !sparse.Dense(file, size) {
		return cas.Hashed{}, sparse.Copy(from, file, path, size)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return cas.Hashed{}, err
	}
	return blobs.CopyAhead(ctx, from, path, size)
}
