// Package workspace makes private copies of the models of a request in a directory of their own,
// and proves that they have the bytes that the request key is made of.
package workspace

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/store"
)

// Maker makes workspaces in the store's directory for staging.
type Maker struct {
	Store    *store.Store
	Runtimes *runtimes.Set // remember the results of Remember
	Checks   keyed.Slots   // bounds the calls of Remember that run at a time
}

// OnCopy returns a function for Remember that calls find with a private copy of the request's
// model. find continues when the request that began it leaves.
func OnCopy[T any](
	in *Maker, record identity.Record, find func(ctx context.Context, graph string) (T, error),
) func(context.Context, *request.Request) (T, error) {
	return func(ctx context.Context, r *request.Request) (out T, err error) {
		j, remove, err := in.Copy(ctx, r, record)
		defer remove()
		if err != nil {
			return out, err
		}
		return find(ctx, j.Copies[0].Path)
	}
}

// Copy makes private copies of the request's models, proven to be what its key was made of. remove
// may be called in any case.
func (in *Maker) Copy(ctx context.Context, r *request.Request, record identity.Record) (
	w *Workspace, remove func(), err error) {
	w = New(r, &record, jobs.NewID()[:16])
	if w.Folder, remove, err = in.Store.Stage("own-"); err == nil {
		err = Room(w.Folder, r.AllFiles())
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

// Remember is runtimes.Remember for results that need the request's models: find gets them with
// descriptors of its own, because the caller may leave before the end.
func Remember[T any](ctx context.Context, in *Maker, r *request.Request, key string,
	lasts func(T) bool, find func(context.Context, *request.Request) (T, error)) (T, error) {
	none, known := runtimes.Recall[T](in.Runtimes, key)
	if known {
		return none, nil
	}
	own, err := r.Own()
	if err != nil {
		return none, err
	}
	var taken atomic.Bool // own, by whichever closes it
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
		leave, err := in.Checks.Take(ctx) // after an update many may be asked for at a time
		if err != nil {
			return none, err
		}
		defer leave()
		return find(ctx, own)
	}
	return runtimes.Remember(ctx, in.Runtimes, runtimes.Question{Key: key}, lasts, try)
}

// Original is a job's model in its owner's file. A worker may read it there, without a private
// copy, where the memo has the digest under the file's stamp. The output counts only if the file
// has the same stamp when the compile is over.
type Original struct {
	File  *os.File  // open for reading only; no client shares the open file
	Stamp cas.Stamp // that the memo has the digest under
}

// ErrOriginal says that the model has to be compiled from a private copy.
var ErrOriginal = errors.New("the model's file changed, or cannot be compiled where it lies")

// Proof reports whether the file has the bytes that were keyed, and had them all the time. The
// memo's digest was taken after the file was written back, so every store since has moved its
// times.
func (o *Original) Proof() error {
	stamp, err := cas.StampOf(o.File)
	if err != nil || stamp != o.Stamp {
		return ErrOriginal
	}
	return nil
}

// Close closes the file. It does nothing for nil.
func (o *Original) Close() {
	if o != nil {
		_ = o.File.Close() // opened for reading only: nothing can be lost
	}
}

// MayBeToBlame reports whether a compile may have failed because it read the original and not a
// copy: a worker that died is replaced anyway, and a refusal that names the file may be about its
// path.
func (o *Original) MayBeToBlame(err error, path string) bool {
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
