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

// The scrub verifies every blob in turn, so that damage is found before an application needs the
// blob. The packer's loop runs it after its own work, and each time it reads as many bytes as its
// rate allows for the time since the last run.

const (
	scrubRate  = 32 << 20 // bytes per second while it reads, at most
	scrubPiece = 1 << 20  // bytes per read, at most
	// maxScrubFiles bounds the time without a daemon for which bytes become due.
	maxScrubFiles = 24 * time.Hour
)

// Pass is one pass of the scrub through the store.
type Pass struct {
	Began, Ended time.Time // zero: not yet
	Files        uint64
	Bytes        int64
	Damaged      uint64 // damaged files
}

// Scrub is the progress of the scrub. The index stores it, so that the next daemon continues there.
type Scrub struct {
	Last, This Pass
	From       cas.Digest // the last blob read in this pass
	At         time.Time  // when Due was computed
	Due        int64      // bytes to read; negative: bytes read early
}

var scrubKey = []byte("scrub")

// ScrubState returns the progress of the scrub.
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

// Scrub reads the blobs that are due. It quarantines damaged ones, and their builds are compiled
// again.
func (p *Packer) Scrub(ctx context.Context) {
	every, now, s := p.st.settings.Load().Verify, p.st.now(), p.st.ScrubState()
	within := func(since time.Time, d time.Duration) bool {
		// so that a clock which was set back causes no delay
		return !now.Before(since) && now.Sub(since) < d
	}
	if every == 0 || within(s.At, packEvery) || s.This.Began.IsZero() &&
		within(s.Last.Began, every) {
		return
	}
	space, err := p.st.index.Space()
	if err != nil {
		return // the next user of the index reports the error
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
			return nil // the same blob again, for another build
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

// verify reads and hashes a blob; a packed one it reads through its recipe. If the digest is wrong,
// it reads the blob again while no blob is packed or unpacked, and then repairs it.
func (p *Packer) verify(ctx context.Context, d cas.Digest) (damaged bool, err error) {
	from, err := p.st.packing.OpenUnverified(d)
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
	leave, err := p.st.packing.LockRepresentation(ctx)
	if err != nil {
		return false, err
	}
	err = p.st.packing.Check(ctx, d)
	leave()
	if !packing.IsMissingOrDamaged(err) || !p.st.isMissed(d, errors.Is(err, cas.ErrNotFound)) {
		// it was being packed, was removed with its builds, or is known to be damaged
		return false, nil
	}
	p.st.log.Warn("the background verification has found "+
		"damage", "digest", d.String(), "error", err)
	return true, p.st.Repair(ctx, d, err.Error())
}

// isMissed reports whether a build that is not withheld for damage needs the blob. For a missing
// blob only builds count that serve it.
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
