package build

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/store"
)

// store puts the files and then the manifest: from there on the build is acknowledged.
func (j *Job) store(ctx context.Context, b *index.Build, out string,
	hashed map[string]cas.Hashed) (*jobs.Result, error) {
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
	m := store.Publication{Build: b, Folder: out, Hashed: hashed, UID: j.Peer.UID, Room: j.room,
		Kind: event.Compiled,
		Text: fmt.Sprintf("by %s in %.2f s", request.Makers(b), b.CompileSeconds)}
	if j.again.Why != "" {
		m.Kind, m.Counter, m.Text = event.Rebuilt, "rebuilds", m.Text+": "+j.again.Why
		m.Replaces = j.again.Replaces // of other libraries, perhaps
	}
	err := j.bd.Store.Publish(ctx, m, hold)
	if err != nil && ctx.Err() != nil {
		return nil, apierr.New(apierr.Cancelled, err, "model %q", b.ModelName)
	}
	if err != nil {
		return j.bd.unkept(b, out, err)
	}
	j.bd.Stored(j.Attempt, b, j.running.Done())
	return &jobs.Result{Build: b}, nil
}

// setAside reserves space for the job's result, as far as that can be guessed, so that the
// collector can make it while the compile runs. A failure says nothing, because settle reserves
// what counts. A guess does not count to the user's quota: otherwise the user's other builds might
// be evicted for a result that is not kept.
func (j *Job) setAside(ctx context.Context, about *jobs.About) {
	if j.scope == "" {
		return
	}
	j.room = j.bd.Store.Unreserved(j.Peer.UID)
	disk, _ := store.NeedOf(j.bd.Jobs.Costs.Output(about.Kind()))
	_ = j.room.ResizeTo(ctx, false, disk, 0)
}

// settle makes the reservation as large as the result. It returns why there is no space for it.
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
		for _, f := range j.Descriptors() {
			if info, err := f.Stat(); err == nil { // otherwise the copy fails
				sizes = append(sizes, info.Size())
			}
		}
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

// unkept serves a build that cannot be stored, because the application waits for it.
func (bd *Builder) unkept(b *index.Build, out string, why error) (*jobs.Result, error) {
	text := "not kept: " + textOf(why)
	hint := ""
	if e := (*apierr.Error)(nil); errors.As(why, &e) && e.Class == apierr.NoSpace && e.Hint != "" {
		hint = e.Hint
		text += "; " + hint
	}
	b.Warnings = append(b.Warnings[:len(b.Warnings):len(b.Warnings)], text)
	result, err := bd.keepAlone(b, out)
	if err != nil {
		return nil, err
	}
	result.Why = text
	if request.StoreClass(why) == apierr.NoSpace {
		bd.Store.Index().Counters.Add("unkept", 1)
		bd.Log.Warn("build not kept", "model", b.ModelName, "why", textOf(why))
	} else {
		bd.Log.Error("build not stored", "model", b.ModelName, "error", why)
		bd.Store.LookAround()
	}
	happened := event.Of(b, event.Unkept, "%s", textOf(why))
	happened.Scope = happened.By // only the user that asked for it hears of it
	if err := memo.Save(&bd.Store.Index().Memos, event.UnkeptKey(&happened), hint); err != nil {
		// The doctor has a general one.
		bd.Log.Warn("hint not kept", "model", b.ModelName, "error", err)
	}
	bd.Store.Happened(happened)
	return result, nil
}

func textOf(err error) string {
	var e *apierr.Error
	if errors.As(err, &e) {
		return e.Text
	}
	return err.Error()
}

// keepAlone makes a view for the requests that wait now. Nothing is stored.
func (bd *Builder) keepAlone(b *index.Build, out string) (*jobs.Result, error) {
	v, err := bd.Store.Views().Alone(b, out)
	if err != nil {
		return nil, request.StoreError(err, b.ModelName)
	}
	return &jobs.Result{Build: b, Alone: v}, nil
}
