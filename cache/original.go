package cache

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/witness"
)

// original is a job's model where its owner has it. A worker may read it there, and no private copy is needed, while something vouches that it
// has the bytes that were keyed: a guard that was taken before they were hashed, or a stamp that is believed, as the memo
// believes it. What came of the compile counts only if that still stands at its end.
type original struct {
	file  *os.File       // open for reading only, which no client shares
	guard *witness.Guard // the request's; nil: the stamp tells
	stamp cas.Stamp      // then
}

// errOriginal says that the model has to be compiled from a private copy after all.
var errOriginal = errors.New("the original will not do")

// lookAtOriginal is how often the stamp of an original is compared while it is compiled: a change ends that.
const lookAtOriginal = 250 * time.Millisecond

// original gives the job's model as it is, nil where a private copy has to be made: nothing vouches for it, or the compiler cannot have it so. Where a
// model is more than one file, execution providers refuse what does not really lie together.
func (j *job) original(ctx context.Context, spec compilers.Job) *original {
	opener, ok := j.c.compiler.(compilers.Opener)
	if !ok || j.copied || j.request.models() > 1 || j.request.VerifyOutput != 0 {
		return nil
	}
	o := &original{guard: j.request.guard}
	if !o.guard.Stands() {
		o.guard = nil
		if o.stamp, ok = j.c.knownStamp(j.request, j.plan.canonical.Model); !ok {
			return nil
		}
	}
	fd, err := witness.OpenAgain(j.request.Graph)
	if err != nil {
		return nil // others may not read it; its user sent it open
	}
	o.file = os.NewFile(uintptr(fd), j.request.Graph.Name())
	spec.ModelFile = o.file
	m, err := o.read(ctx, j.request.Name)
	if err != nil || len(m.Locations()) > 0 || !opener.TakesOpen(spec) {
		o.close()
		return nil // what is wrong with the model its copy tells
	}
	j.copies, j.open, j.dimensions = []modelCopy{{path: spec.Model, original: o}}, nil, nil
	j.addDimensions(j.request, m)
	return o
}

// knownStamp gives the stamp of the request's graph, if the memo has the digest under it.
func (c *Cache) knownStamp(r *Request, digest cas.Digest) (cas.Stamp, bool) {
	stamp, err := cas.StampOf(r.Graph)
	if err != nil {
		return cas.Stamp{}, false
	}
	key, ok := memoKey(r.Peer.UID, r.Graph) // takes a stamp of its own: the first one is compared from here on
	if !ok {
		return cas.Stamp{}, false
	}
	id, ok, err := c.remembered(r, key)
	return stamp, ok && err == nil && id.Digest == digest
}

func (o *original) read(ctx context.Context, name string) (*epmodel.Model, error) {
	src, err := epmodel.FileSource(o.file)
	if err != nil {
		return nil, err
	}
	return epmodel.Read(ctx, name, src)
}

// stands tells whether the file has the bytes that were keyed, and had them all the time.
func (o *original) stands() bool {
	if o.guard != nil {
		return o.guard.Stands()
	}
	stamp, err := cas.StampOf(o.file)
	return err == nil && stamp == o.stamp
}

// proof is that of a private copy, and takes no time.
func (o *original) proof(context.Context) error {
	if !o.stands() {
		return errOriginal
	}
	return nil
}

// during gives a context that ends as soon as the original does not stand any more. nil is a private copy, which always does.
func (o *original) during(ctx context.Context) (context.Context, context.CancelFunc) {
	if o == nil {
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	go o.watch(ctx, cancel)
	return ctx, func() { cancel(nil) }
}

func (o *original) watch(ctx context.Context, cancel context.CancelCauseFunc) {
	lost := o.guard.Lost()
	tick := time.NewTicker(lookAtOriginal)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-lost:
		case <-tick.C:
		}
		if !o.stands() {
			cancel(errOriginal)
			return
		}
	}
}

// close ends the use of the original; the guard is the request's.
func (o *original) close() {
	if o != nil {
		_ = o.file.Close() // opened for reading only: nothing can be lost
	}
}

// mayBeToBlame tells whether a compile may have failed because it was the original's and no copy's: a worker that died is replaced anyway, and what is
// refused with the name of the file may be the way to it.
func (o *original) mayBeToBlame(err error, path string) bool {
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
