package build

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
)

// store puts the files and then the manifest: from there on the build is acknowledged.
func (j *Job) store(ctx context.Context, b *index.Build, out string, hashed map[string]cas.Hashed) (*jobs.Result, error) {
	if why := j.settle(ctx, b, out); why != nil {
		return j.bd.unkept(b, out, why)
	}
	hold := j.bd.Store.Blobs().Hold()
	j.kept = make(map[string]index.File) // by this hold
	b.Source = j.keepSource(ctx, 0, hold)
	for i := 1; i < len(b.Members); i++ {
		b.Members[i].Source = j.keepSource(ctx, i, hold)
	}
	defer j.bd.Store.Forms().Release(hold)
	m := store.Publication{Build: b, Folder: out, Hashed: hashed, UID: j.Peer.UID, Room: j.room, Kind: event.Compiled,
		Text: fmt.Sprintf("by %s in %.2f s", request.Makers(b), b.CompileSeconds)}
	if j.again.Why != "" {
		m.Kind, m.Counter, m.Replaces = event.Rebuilt, "rebuilds", j.again.Replaces // of other libraries, perhaps
		m.Text += ": " + j.again.Why
	}
	err := j.bd.Store.Publish(ctx, m, hold)
	if err != nil && ctx.Err() != nil {
		return nil, apierr.New(apierr.Cancelled, err, "model %q", b.ModelName)
	}
	if err != nil {
		// Not kept is no reason not to serve what is compiled and checked: the application waits
		// for it.
		return j.bd.unkept(b, out, err)
	}
	j.bd.Stored(j.Attempt, b, j.running.Done())
	return &jobs.Result{Build: b}, nil
}

// setAside reserves room for what the job will bring, as far as that can be guessed, so that the
// collector can make it while the compile runs. That there is none yet says nothing: what counts is
// found out before a byte is stored. To its user's quota a guess does not count: others of the
// user's would go for what is not kept then.
func (j *Job) setAside(ctx context.Context, about *jobs.About) {
	if j.scope == "" {
		return
	}
	j.room = j.bd.Store.Unreserved(j.Peer.UID)
	disk, _ := store.NeedOf(j.bd.Jobs.Costs.Output(about.Kind()))
	_ = j.room.ResizeTo(ctx, false, disk, 0)
}

// settle makes the reservation as large as what was compiled, whose files have these sizes, and
// says why there is no room for it, if there is none.
func (j *Job) settle(ctx context.Context, b *index.Build, out string) (why error) {
	var sizes []int64
	j.output = 0
	for _, f := range b.Files {
		info, err := os.Lstat(filepath.Join(out, filepath.FromSlash(f.Name)))
		if err != nil {
			return err
		}
		sizes = append(sizes, info.Size())
		j.output += info.Size()
	}
	if j.bd.Settings().KeepSource == KeepCopy {
		sizes = append(sizes, j.sourceSizes()...)
	}
	j.room.Written = writtenOf(b, sizes)
	return j.room.Resize(ctx, true, sizes...)
}

// writtenOf is what of a compile's result is on the disk already: sizes are those of its files, and
// then of what is copied.
func writtenOf(b *index.Build, sizes []int64) (disk int64) {
	for _, size := range sizes[:min(len(b.Files), len(sizes))] {
		disk += cas.OnDisk(size)
	}
	return disk
}

// sourceSizes are those of the files that are kept as copies of the source models.
func (j *Job) sourceSizes() (sizes []int64) {
	for _, f := range j.Descriptors() {
		if info, err := f.Stat(); err == nil { // else the copy will tell
			sizes = append(sizes, info.Size())
		}
	}
	return sizes
}
