// Package workspace provides the models for compiles. A Workspace has private copies of a request's
// models, verified to have the bytes that the request key was made from. Sources opens the recorded
// source models of builds that are compiled again.
package workspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/sparse"
	"github.com/epcached/epcached/store"
)

// Maker makes workspaces in the store's directory for staging.
type Maker struct {
	Store    *store.Store
	Runtimes *runtimes.Set // stores the results of Remember
	// Checks bounds the concurrent load checks and conversions.
	Checks *jobs.Queue
	// Comparisons bounds the checks of requests that compare outputs, because one may take half a
	// minute, and would keep compiles and load checks of other users waiting.
	Comparisons *jobs.Queue
	Owner       func(uid uint32) uint32
	SlowCopies  *keyed.Shares[uint32] // bounds the copies of CopySlowFiles, by owner
	slow        slowBytes
}

// AcquireSlot waits for a slot for a load check; r may be nil if no request waits for it.
func (in *Maker) AcquireSlot(ctx context.Context, r *request.Request) (leave func(), err error) {
	switch {
	case r == nil:
		return in.Checks.AcquireSlot(ctx)
	case r.VerifyOutput > 0:
		return in.Comparisons.AcquireSlot(ctx, in.Owner(r.Peer.UID))
	}
	return in.Checks.AcquireSlot(ctx, in.Owner(r.Peer.UID))
}

// WithCopy returns a function for Remember that calls find with a private copy of the request's
// model. find continues when the caller disconnects.
func WithCopy[T any](in *Maker, record identity.Record, find func(ctx context.Context,
	graph string) (T, error)) func(context.Context, *request.Request) (T, error) {
	return func(ctx context.Context, r *request.Request) (out T, err error) {
		j, remove, err := in.CopyModels(ctx, r, record)
		defer remove()
		if err != nil {
			return out, err
		}
		return find(ctx, j.Copies[0].Path)
	}
}

// CopyModels makes verified private copies of the request's models. The caller calls remove, also
// after an error.
func (in *Maker) CopyModels(ctx context.Context, r *request.Request, record identity.Record) (
	w *Workspace, remove func(), err error) {
	w = New(r, &record, jobs.NewID()[:16])
	if w.Dir, remove, err = in.Store.Stage("own-"); err == nil {
		err = CheckSpace(w.Dir, r.AllFiles())
	}
	if err != nil {
		return nil, remove, request.StoreError(err, r.Name)
	}
	proof, err := w.CopyModel(ctx)
	if err == nil {
		err = proof(ctx)
	}
	return w, remove, err
}

// Remember is runtimes.Remember for results that need the request's models: find gets duplicates of
// the descriptors, because the caller may disconnect before it ends.
func Remember[T any](ctx context.Context, in *Maker, r *request.Request, key string,
	lasts func(T) bool, find func(context.Context, *request.Request) (T, error)) (T, error) {
	none, known := runtimes.Recall[T](in.Runtimes, key)
	if known {
		return none, nil
	}
	own, err := r.WithOwnFiles()
	if err != nil {
		return none, err
	}
	var taken atomic.Bool // own is closed once, by find or by the caller
	defer func() {
		if taken.CompareAndSwap(false, true) {
			own.Close()
		}
	}()
	try := func(ctx context.Context) (T, error) {
		if !taken.CompareAndSwap(false, true) {
			return none, context.Canceled
		}
		defer own.Close()
		// after an update many may be needed at the same time
		leave, err := in.AcquireSlot(ctx, own)
		if err != nil {
			return none, err
		}
		defer leave()
		return find(ctx, own)
	}
	return runtimes.Remember(ctx, in.Runtimes, runtimes.Inquiry{Key: key}, lasts, try)
}

// Original is a job's model in its user's file. A worker may read it in place, without a private
// copy, if the memo has the digest for the file's stamp. The output may be used only if the stamp
// is the same after the compile.
type Original struct {
	File  *os.File  // open for reading only; no client shares the open file
	Stamp cas.Stamp // for which the memo has the digest
}

// ErrOriginalUnusable says that the model has to be compiled from a private copy.
var ErrOriginalUnusable = errors.New("the model's file changed, or cannot be compiled in its place")

// Verify fails if the file may have changed since the memo's digest was made. Comparing the stamp
// suffices: the digest was made after the file was written back, so every later write has changed
// its times.
func (o *Original) Verify() error {
	if stamp, err := cas.StampOf(o.File); err != nil || stamp != o.Stamp {
		return ErrOriginalUnusable
	}
	return nil
}

// Close closes the file. It does nothing for nil.
func (o *Original) Close() {
	if o != nil {
		_ = o.File.Close() // opened for reading, so no data can be lost
	}
}

// MayHaveCaused reports whether a compile may have failed because it read the original instead of a
// copy, so that it is retried with a copy. A refusal that names the file may concern its path. The
// death of a worker counts too, because the compile is retried anyway.
func (o *Original) MayHaveCaused(err error, path string) bool {
	var exit *compilers.ExitError
	var refused *compilers.RefusedError
	switch {
	case o == nil || errors.Is(err, compilers.ErrStart):
		return false
	case errors.As(err, &refused):
		return strings.Contains(refused.Text, filepath.Base(path))
	}
	return errors.As(err, &exit)
}

// modelCopy is the private copy of one of a job's models, or its Original.
type modelCopy struct {
	Path      string
	Locations []string  // of external data, beside it
	respelled [2]string // two locations that name one file in different spellings, if any
	Original  *Original // not nil: there is no copy, and Path exists only for the worker
	// outputs that only the graph at Path has, between ExposeOuter and RestoreCopies; the compiled
	// graph has them longer
	Exposed map[string]bool
}

// OpenGraph opens the graph for reading.
func (c modelCopy) OpenGraph() (*os.File, error) {
	if c.Original == nil {
		return os.Open(c.Path)
	}
	return Reopen(c.Original.File)
}

// Workspace is a directory with private copies of a request's models.
type Workspace struct {
	request *request.Request
	record  *identity.Record // the copies must have its digests
	// base name of the copies, because EPs write file names into their output
	name string
	Dir  string

	Copies     []modelCopy             // the copies made so far
	Open       []request.OpenDimension // of the inputs, not fixed by the request
	dimensions []string                // names of the inputs' dimensions
}

// New returns a workspace without a directory yet. The copies must have the digests in keyed, and
// name is their base name, which EPs write into their output.
func New(of *request.Request, keyed *identity.Record, name string) *Workspace {
	return &Workspace{request: of, record: keyed, name: name}
}

// UseOriginal uses the original instead of a copy. The worker finds it at path.
func (w *Workspace) UseOriginal(path string, o *Original, m *epmodel.Model) {
	w.Copies, w.Open, w.dimensions = []modelCopy{{Path: path, Original: o}}, nil, nil
	w.addDimensions(m)
}

// CopyModel makes the private copies that are compiled. The returned proof hashes them, and fails
// if they do not have the bytes that the key was made from. Call it before any output of the
// compile is used.
func (w *Workspace) CopyModel(ctx context.Context) (proof func(context.Context) error, err error) {
	// may be set by an earlier try of a job that yielded
	w.Copies, w.Open, w.dimensions = nil, nil, nil
	made := make(copiedFiles)
	var models []*epmodel.Model
	for i := range w.request.Models() {
		m, err := w.copyMember(ctx, i, made)
		if err != nil {
			return nil, err
		}
		models = append(models, m)
	}
	return func(ctx context.Context) error { return w.verifyCopies(ctx, models) }, nil
}

// ModelPath returns the path for the copy of a model. dirFor may move models of a group after the
// first one.
func (w *Workspace) ModelPath(i int) string {
	return filepath.Join(w.ModelDir(), w.memberName(i)+".onnx")
}

// verifyCopies compares the copies with the digests in the request record.
func (w *Workspace) verifyCopies(ctx context.Context, models []*epmodel.Model) error {
	var seen identity.Sums
	for i, m := range models {
		got, err := seen.DigestAt(ctx, m, w.Copies[i].Path)
		if err != nil {
			return w.request.ModelFiles(i).ModelError(err)
		}
		if got != w.record.ModelOf(i) {
			return w.changed(i)
		}
	}
	return nil
}

// memberName returns the base name of a model's files. The first one has the plain name, because
// EPs name shared files after it.
func (w *Workspace) memberName(i int) string {
	if i == 0 {
		return w.name
	}
	return fmt.Sprintf("%s_%d", w.name, i+1)
}

// MemberOutput returns the name of the graph that is compiled from one of the job's models.
func (w *Workspace) MemberOutput(i int) string { return w.memberName(i) + "_ctx.onnx" }

// ModelDir is the directory of the copies.
func (w *Workspace) ModelDir() string { return filepath.Join(w.Dir, "model") }

// changed returns the error for a copy that differs from the bytes that the key was made from.
func (w *Workspace) changed(member int) error {
	if two := w.Copies[member].respelled; two[0] != two[1] {
		return apierr.New(apierr.BadModel, nil, "model %q: external data %q and %q name one "+
			"file, and have different bytes",
			w.request.ModelFiles(member).Name, two[0], two[1]).
			WithHint("use real paths: one path has a symbolic link, or the file was being written")
	}
	return w.request.ModelFiles(member).ChangedError(nil)
}

// copiedFiles maps each path in a directory, relative and clean, to the file that was copied there.
type copiedFiles map[string]*os.File

// isTaken reports whether the location's path exists in the directory, and whether it is the same
// file.
func (c copiedFiles) isTaken(location string, f *os.File) (there, same bool) {
	other := c[path.Clean(location)]
	if other == nil {
		return false, false
	}
	a, err := f.Stat()
	if err != nil {
		return true, false
	}
	b, err := other.Stat()
	return true, err == nil && os.SameFile(a, b)
}

// copyMember copies one of the models with its external data, and returns the model. It copies only
// files that the graph refers to, because only their names were checked. A file that several models
// of a group share is copied once. If they give different files the same name, a model gets a
// directory of its own.
func (w *Workspace) copyMember(ctx context.Context, i int,
	made copiedFiles) (*epmodel.Model, error) {
	r := w.request.ModelFiles(i)
	model := w.ModelPath(i)
	if err := CopyPrivate(r.Graph, model); err != nil {
		return nil, request.StoreError(err, r.Name)
	}
	opened := &OpenFiles{}
	defer opened.Close()
	graph, err := opened.Source(model)
	if err != nil {
		return nil, request.StoreError(err, r.Name)
	}
	m, err := epmodel.Read(ctx, filepath.Base(model), graph)
	if err != nil {
		return nil, r.ModelError(err)
	}
	locations := m.Locations()
	w.addDimensions(m)
	dir, err := w.dirFor(i, r, locations, made)
	if err != nil {
		return nil, err
	}
	if dir != filepath.Dir(model) {
		moved := filepath.Join(dir, filepath.Base(model))
		if err := os.Rename(model, moved); err != nil {
			return nil, request.StoreError(err, r.Name)
		}
		model, made = moved, make(copiedFiles)
	}
	one := modelCopy{Path: model, Locations: locations}
	for _, location := range locations {
		if err := one.copyExternal(location, r.External[location], made); err != nil {
			return nil, request.StoreError(err, r.Name)
		}
	}
	w.Copies = append(w.Copies, one)
	return m, nil
}

// copyExternal copies the external data at one location. A file that exists under another spelling
// of the location is not copied again; the proof reads both spellings, so that a difference is
// found.
func (c *modelCopy) copyExternal(location string, f *os.File, made copiedFiles) error {
	dir, at := filepath.Dir(c.Path), path.Clean(location)
	if err := makeParents(dir, location); err != nil {
		return err
	}
	if there, same := made.isTaken(location, f); there {
		if !same {
			c.respelled = [2]string{at, location}
		}
		return nil
	}
	made[at] = f
	return CopyPrivate(f, filepath.Join(dir, filepath.FromSlash(at)))
}

// makeParents makes the directories that a location steps into and leaves again, such as "s" of
// "s/../w.bin", because the system resolves each step.
func makeParents(dir, location string) error {
	parts := strings.Split(location, "/")
	for i, part := range parts {
		if part != ".." {
			continue
		}
		step := filepath.Join(dir, filepath.Join(parts[:i]...))
		if err := os.MkdirAll(step, 0o700); err != nil {
			return err
		}
	}
	return nil
}

// dirFor returns a model's directory: that of the first model, unless one of its names exists
// there.
func (w *Workspace) dirFor(i int, r identity.Files, locations []string, made copiedFiles) (
	string, error) {
	for _, location := range locations {
		f := r.External[location]
		if f == nil {
			return "", r.ChangedError(nil)
		}
		if there, same := made.isTaken(location, f); there && !same {
			dir := filepath.Join(w.ModelDir(), strconv.Itoa(i+1))
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return "", request.StoreError(err, r.Name)
			}
			return dir, nil
		}
	}
	return w.ModelDir(), nil
}

// OpenFiles are files that are read, and closed together.
type OpenFiles struct{ Open []*os.File }

// Source opens the file at the path.
func (o *OpenFiles) Source(path string) (epmodel.Source, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	o.Open = append(o.Open, f)
	return epmodel.FileSource(f)
}

// Close closes all that Source opened.
func (o *OpenFiles) Close() {
	for _, f := range o.Open {
		_ = f.Close() // opened for reading, so no data can be lost
	}
}

// addDimensions records the dimensions of one model's inputs, without duplicates.
func (w *Workspace) addDimensions(m *epmodel.Model) {
	for _, d := range w.request.OpenDimensions(m) {
		same := func(o request.OpenDimension) bool {
			return o.Name == d.Name && o.Denotation == d.Denotation
		}
		if !slices.ContainsFunc(w.Open, same) {
			w.Open = append(w.Open, d)
		}
	}
	w.dimensions = append(w.dimensions, identity.FreeDimensions(m)...)
}

// UnusedDimensions lists the dimensions that the request fixes but no input has. ONNX Runtime
// ignores them silently.
func (w *Workspace) UnusedDimensions() (names []string) {
	for _, name := range slices.Sorted(maps.Keys(w.request.FreeDimensions)) {
		if !slices.Contains(w.dimensions, name) {
			names = append(names, name)
		}
	}
	return names
}

// CopyPath is CopyPrivate for a file by its path.
func CopyPath(from, to string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	return errors.Join(CopyPrivate(f, to), f.Close())
}

// Reopen opens an open file again, for reading only, if the daemon may. It does not block on a
// lease that another process holds on the file.
func Reopen(f *os.File) (*os.File, error) {
	const flags = unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY
	path := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	again, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open again", Path: f.Name(), Err: err}
	}
	return again, nil
}

// CopyPrivate copies a client's file to a new file of ours, through the descriptor alone. The bytes
// are cloned if the file system supports that.
func CopyPrivate(from *os.File, path string) error {
	info, err := from.Stat()
	if err != nil {
		return err
	}
	err = sparse.Copy(from, from, path, info.Size())
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return nil // it changed in the meantime, so the copy's proof will fail
	}
	return err
}

// CheckSpace fails if a private copy of the files does not fit, with a margin, into the directory's
// file system. It counts allocated blocks, because holes take no space.
func CheckSpace(dir string, files []*os.File) error {
	var need int64
	for _, f := range files {
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			return err
		}
		need += st.Blocks * 512
	}
	free, err := cas.FreeBytes(dir)
	if err != nil {
		return err
	}
	return store.Fits("a copy of the model", need, free)
}
