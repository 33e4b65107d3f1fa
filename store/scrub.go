package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/store/packing"
)

// The scrub reads every blob in turn and compares its digest, so that damage is found before an
// application needs the blob. It is a part of the packer's loop, which has it read, after its own
// work, the bytes that are due by then.

const (
	scrubRate  = 32 << 20 // bytes a second at most, while it reads
	scrubPiece = 1 << 20  // bytes in one read at most
	// the time for which bytes become due while no daemon runs, at most
	maxScrubFiles = 24 * time.Hour
)

// Pass is one time that the scrub goes through the store.
type Pass struct {
	Began, Ended time.Time // zero: not yet
	Files        uint64
	Bytes        int64
	Damaged      uint64 // of the files
}

// Scrub is what the scrub has done. The index remembers it, so that the next daemon goes on there.
type Scrub struct {
	Last, This Pass
	From       cas.Digest // the last one that was read in this pass
	At         time.Time  // when bytes were last due
	Due        int64      // bytes that are to be read; negative: those that were read too early
}

var scrubKey = []byte("scrub")

// ScrubState returns what the scrub has done.
func (st *Store) ScrubState() (s Scrub) {
	if row, ok := st.index.Memos.Get(scrubKey); !ok || json.Unmarshal(row, &s) != nil {
		return Scrub{}
	}
	return s
}

// Result returns the last complete pass, or this one if there is none or if it has found damage.
func (s Scrub) Result() Pass {
	if s.Last.Ended.IsZero() || s.This.Damaged > 0 {
		return s.This
	}
	return s.Last
}

func (p Pass) String() string {
	until := "now, not all yet"
	if !p.Ended.IsZero() {
		until = p.Ended.UTC().Format(time.RFC3339)
	}
	if p.Files == 0 && p.Damaged == 0 {
		return "no files yet"
	}
	return fmt.Sprintf("%d files with %s verified from %s until %s: %d damaged", p.Files,
		bytesize.Text(p.Bytes), p.Began.UTC().Format(time.RFC3339), until, p.Damaged)
}

// Scrub reads the blobs that are due. Damaged ones are quarantined, and their builds compiled
// again.
func (p *Packer) Scrub(ctx context.Context) {
	every, now, s := p.st.settings.Load().Verify, p.st.now(), p.st.ScrubState()
	within := func(since time.Time, d time.Duration) bool {
		return !now.Before(since) && now.Sub(since) < d // a clock that was set back delays nothing
	}
	if every == 0 || within(s.At, packEvery) || s.This.Began.IsZero() &&
		within(s.Last.Began, every) {
		return
	}
	space, err := p.st.index.Space()
	if err != nil {
		return // whatever needs the index next reports it
	}
	passed := packEvery
	if within(s.At, maxScrubFiles) {
		passed = now.Sub(s.At)
	}
	s.At, s.Due = now, s.Due+max(1,
		int64(float64(space.UniqueBytes)*passed.Seconds()/every.Seconds()))
	if s.This.Began.IsZero() {
		s.This, s.From = Pass{Began: now}, cas.Digest{}
	}
	err = p.st.index.EachNeed(ctx, s.From, func(n index.Need) error {
		if n.Blob == s.From {
			return nil // another build's need of it
		}
		if s.Due <= 0 {
			return errNotDue
		}
		damaged, err := p.verify(ctx, n.Blob)
		if err != nil {
			return err
		}
		s.From, s.Due = n.Blob, s.Due-n.Size
		s.This.Files, s.This.Bytes = s.This.Files+1, s.This.Bytes+n.Size
		if damaged {
			s.This.Damaged++
		}
		return p.saveScrub(&s)
	})
	if err == nil {
		s.This.Ended = now
		s.Last, s.This, s.Due = s.This, Pass{}, 0
	}
	if kept := p.saveScrub(&s); kept != nil || err != nil && ctx.Err() == nil &&
		!errors.Is(err, errNotDue) && !errors.Is(err, ErrCollected) {
		p.st.log.Warn("the background verification continues "+
			"later", "error", errors.Join(err, kept))
	}
}

var errNotDue = errors.New("not due")

func (p *Packer) saveScrub(s *Scrub) error {
	row, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return p.st.index.Memos.Save(scrubKey, row)
}

// verify reads a blob, a packed one as its recipe gives it. If the bytes are wrong it reads it
// again while no blob changes its form, and repairs.
func (p *Packer) verify(ctx context.Context, d cas.Digest) (damaged bool, err error) {
	from, err := p.st.forms.OpenUnverified(d)
	if err == nil {
		var got cas.Digest
		got, err = cas.Sum(ctx, idleReader{from, ctx, p}, 0, from.Size())
		if err = errors.Join(err, from.Close()); err == nil && got != d {
			err = &cas.CorruptError{Digest: d, Got: got}
		}
	}
	if !packing.IsMissingOrDamaged(err) {
		return false, err
	}
	leave, err := p.st.forms.LockForm(ctx)
	if err != nil {
		return false, err
	}
	err = p.st.forms.Check(ctx, d)
	leave()
	if !packing.IsMissingOrDamaged(err) || !p.st.isMissed(d, errors.Is(err, cas.ErrNotFound)) {
		// it had another form just then, is gone with its builds, or is known to be damaged
		return false, nil
	}
	p.st.log.Warn("the background verification has found "+
		"damage", "digest", d.String(), "error", err)
	return true, p.st.Repair(ctx, d, err.Error())
}

// isMissed reports whether a build that is not withheld for damage needs the blob. A missing
// blob is needed only by builds that serve it.
func (st *Store) isMissed(d cas.Digest, missing bool) bool {
	all, err := st.Needs(d)
	return err != nil || slices.ContainsFunc(all, func(n Need) bool {
		b, err := st.index.Get(n.Build)
		return err == nil && st.index.Journal.StateOf(b.ID).Name != index.Damaged &&
			(!missing || b.HasModel(n.Blob))
	})
}

// idleReader reads for the scrub: slowly, while the daemon is idle, and after all other programs.
type idleReader struct {
	io.ReaderAt
	ctx context.Context
	p   *Packer
}

func (r idleReader) ReadAt(b []byte, off int64) (int, error) {
	if err := r.p.AwaitIdleRead(r.ctx); err != nil {
		return 0, err
	}
	if err := r.p.slowly.WaitN(r.ctx, len(b)); err != nil {
		return 0, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer idleIO()()
	return r.ReaderAt.ReadAt(b, off)
}
