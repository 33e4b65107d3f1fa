package build

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"unicode/utf8"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/store"
)

// store puts the files and then the manifest, which makes the build durable.
func (j *Job) store(ctx context.Context, b *index.Build, out string,
	hashed map[string]cas.Hashed) (*jobs.Result, error) {
	if why := j.resizeReservation(ctx, b, out); why != nil {
		return j.bd.serveUnkept(b, out, why)
	}
	hold := j.bd.Store.Blobs().Hold()
	j.keptSources = make(map[string]index.File) // those that this hold keeps
	b.Source = j.keepSource(ctx, 0, hold)
	for i := 1; i < len(b.Members); i++ {
		b.Members[i].Source = j.keepSource(ctx, i, hold)
	}
	defer j.bd.Store.Packing().Release(hold)
	m := store.Publication{Build: b, Dir: out, Hashed: hashed, UID: j.Peer.UID,
		Reservation: j.reservation, Kind: event.Compiled,
		Text: fmt.Sprintf("by %s in %s", request.Makers(b), bytesize.Seconds(b.CompileSeconds))}
	if j.recompile.Why != "" {
		m.Kind, m.Counter, m.Text = event.Rebuilt, "rebuilds", m.Text+": "+j.recompile.Why
		m.Replaces = j.recompile.Replaces // it may have been made by other libraries
	}
	err := j.bd.Store.Publish(ctx, m, hold)
	if err != nil && ctx.Err() != nil {
		return nil, apierr.New(apierr.Cancelled, err, "model %q", b.ModelName)
	}
	if err != nil {
		return j.bd.serveUnkept(b, out, err)
	}
	j.bd.OnStored(j.Attempt, b, j.running.Done())
	return &jobs.Result{Build: b}, nil
}

// reserveEstimate reserves space for the job's result, as far as that can be guessed, so that the
// collector can evict while the compile runs. A failure is ignored, because resizeReservation
// reserves the exact size later. The estimate does not count towards the user's quota, because
// otherwise the user's other builds might be evicted for a result that is not stored.
func (j *Job) reserveEstimate(ctx context.Context, about *jobs.Description) {
	if j.scope == "" {
		return
	}
	j.reservation = j.bd.Store.Unreserved(j.Peer.UID)
	disk, _ := store.SpaceOf(j.bd.Jobs.Costs.Output(about.Kind()))
	_ = j.reservation.ResizeTo(ctx, false, disk, 0)
}

// resizeReservation resizes the reservation to the result, or returns why there is no space for it.
func (j *Job) resizeReservation(ctx context.Context, b *index.Build, out string) (why error) {
	var sizes []int64
	j.outputEstimate = 0
	for _, f := range b.Files {
		info, err := os.Lstat(filepath.Join(out, filepath.FromSlash(f.Name)))
		if err != nil {
			return err
		}
		sizes = append(sizes, info.Size())
		j.outputEstimate += info.Size()
	}
	if j.bd.Settings().KeepSource == KeepCopy {
		for _, f := range j.Descriptors() {
			if info, err := f.Stat(); err == nil { // otherwise the copy fails later
				sizes = append(sizes, info.Size())
			}
		}
	}
	j.reservation.Written = writtenBytes(b, sizes)
	return j.reservation.Resize(ctx, true, sizes...)
}

// writtenBytes returns how many bytes of a compile's result are on the disk already. sizes has the
// sizes of the build's files, and after them those of copies that are still to be made.
func writtenBytes(b *index.Build, sizes []int64) (disk int64) {
	for _, size := range sizes[:min(len(b.Files), len(sizes))] {
		disk += cas.RoundUpToBlock(size)
	}
	return disk
}

// serveUnkept serves a build that cannot be stored to the waiting requests.
func (bd *Builder) serveUnkept(b *index.Build, out string, why error) (*jobs.Result, error) {
	text := "not stored: " + textOf(why)
	hint := ""
	if e := (*apierr.Error)(nil); errors.As(why, &e) && e.Class == apierr.NoSpace && e.Hint != "" {
		hint = e.Hint
		text += "; " + hint
	}
	b.Warnings = append(b.Warnings[:len(b.Warnings):len(b.Warnings)], text)
	result, err := bd.createUnkeptView(b, out)
	if err != nil {
		return nil, err
	}
	result.Why = text
	if request.StoreClass(why) == apierr.NoSpace {
		bd.Store.Index().Counters.Add("unkept", 1)
		bd.Log.Warn("build not stored", "model", b.ModelName, "why", textOf(why), "uid", b.UID)
	} else {
		bd.Log.Error("build not stored", "model", b.ModelName, "error", why, "uid", b.UID)
		bd.Store.CheckStateDirectory()
	}
	happened := event.Of(b, event.Unkept, "%s", textOf(why))
	happened.Scope = happened.By // only the requesting user sees the event
	if err := memo.Save(&bd.Store.Index().Memos, event.UnkeptKey(&happened), hint); err != nil {
		// Without it, doctor gives a general hint.
		bd.Log.Warn("execution provider's hint not recorded", "model", b.ModelName, "error", err)
	}
	bd.Store.RecordEvent(happened)
	return result, nil
}

func textOf(err error) string {
	if e, is := errors.AsType[*apierr.Error](err); is {
		return e.Text
	}
	return err.Error()
}

// createUnkeptView makes a view, without storing the build, for the requests that wait now.
func (bd *Builder) createUnkeptView(b *index.Build, out string) (*jobs.Result, error) {
	v, err := bd.Store.Views().CreateUnkept(b, out)
	if err != nil {
		return nil, request.StoreError(err, b.ModelName)
	}
	return &jobs.Result{Build: b, Alone: v}, nil
}

// Values of Settings.KeepSource: how source models are kept for a later rebuild.
const (
	// remember the paths of files of the daemon's own user, and of files that all may read
	KeepReference = "reference"
	KeepCopy      = "copy" // put every file into the store
	KeepNone      = "none"
)

// CheckKeepSource returns how source models are kept, KeepReference for "".
func CheckKeepSource(how string) (string, error) {
	switch how {
	case "":
		return KeepReference, nil
	case KeepReference, KeepCopy, KeepNone:
		return how, nil
	}
	return "", fmt.Errorf("keep_source is %q: it must be %s, %s or %s",
		how, KeepReference, KeepCopy, KeepNone)
}

// keepSource records where one of the job's models can be found for a rebuild. If it cannot be
// kept, the compile goes on, the source says why, and a rebuild waits for the next request, which
// has the model. hold keeps the blobs of a copy until the build is published.
func (j *Job) keepSource(ctx context.Context, member int, hold *cas.Hold) index.Source {
	how := j.bd.Settings().KeepSource
	var s index.Source
	if member < len(j.recompile.Sources) {
		s = j.recompile.Sources[member]
	}
	if how != KeepNone && s.Kind == index.SourceCopy && allKept(ctx, hold, s.Files) {
		return s // it was just compiled from the store's copy, and that path must not be recorded
	}
	var err error
	switch how {
	case KeepReference:
		f, external := j.Request.ModelFiles(member), make(map[string]*os.File)
		for _, location := range j.Copies[member].Locations {
			external[location] = f.External[location]
		}
		f.External = external
		s, err = j.bd.Kept.References.RememberPaths(ctx, f, !j.recompile.Foreign &&
			j.Peer.UID == j.bd.Kept.UID)
	case KeepCopy:
		s, err = j.copySource(ctx, member, hold)
	default:
		return index.Source{Why: index.WhySwitchedOff}
	}
	if err != nil {
		j.bd.Log.Info("no copy of the source model",
			"model", j.Request.ModelFiles(member).Name, "why", err)
		return index.Source{Why: whyNotKept(err)}
	}
	return s
}

func whyNotKept(err error) string {
	switch {
	case errors.Is(err, fs.ErrPermission): // also if a parent directory may not be searched
		return index.WhyClosed
	case errors.Is(err, identity.ErrNoPath):
		return index.WhyNoPath
	case errors.Is(err, identity.ErrPrivate):
		return index.WhyPrivate
	case errors.Is(err, identity.ErrUnanswered):
		return index.WhyElsewhere
	}
	return index.WhyFailed
}

// allKept reports whether all of the files are blobs that will stay.
func allKept(ctx context.Context, hold *cas.Hold, files []index.File) bool {
	return !slices.ContainsFunc(files, func(f index.File) bool {
		there, err := hold.Keep(ctx, f.Digest)
		return err != nil || !there
	})
}

// copySource makes blobs of the source model.
func (j *Job) copySource(ctx context.Context, member int, hold *cas.Hold) (index.Source, error) {
	s := index.Source{Kind: index.SourceCopy}
	add := func(location, path string, open func() (*os.File, error)) error {
		f := index.File{Name: location}
		if !utf8.ValidString(location) {
			return fmt.Errorf("external data %q: not UTF-8", location)
		}
		// Members of a group may share a file: it is stored, and its space reserved, once.
		if there, ok := j.keptSources[path]; ok {
			there.Name = location
			s.Files = append(s.Files, there)
			return nil
		}
		from, err := open()
		if err != nil {
			return err
		}
		if err = workspace.CheckSpace(j.Dir, []*os.File{from}); err == nil {
			f.Digest, f.Size, err = hold.PutFile(ctx, from)
		}
		if err == nil {
			j.keptSources[path] = f
		}
		s.Files = append(s.Files, f)
		return errors.Join(err, from.Close())
	}
	model := j.Copies[member]
	if err := add("", model.Path, model.OpenGraph); err != nil {
		return index.Source{}, err
	}
	if model.Original != nil {
		if err := model.Original.Verify(); err != nil {
			return index.Source{}, err // the file may have changed while it was copied
		}
	}
	for _, location := range model.Locations {
		path := filepath.Join(filepath.Dir(model.Path), filepath.FromSlash(location))
		open := func() (*os.File, error) { return os.Open(path) }
		if err := add(location, path, open); err != nil {
			return index.Source{}, err
		}
	}
	return s, nil
}
