package remotes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
	"github.com/epcached/epcached/store"
)

// Ask is a request for which the remotes may be queried.
type Ask struct {
	*request.Attempt
	Estimate time.Duration // expected time of the compile; 0: unknown
	// Progress is called with the progress of a fetch, and the time left, 0 if unknown.
	Progress func(done, total int64, left time.Duration)
	Refresh  bool // ignore the negative cache, and read the trust document
	Patient  bool // no compile waits, so a fetch may go on while bytes arrive

	began time.Time
}

// whyNot returns why no remote is queried, "" if they are.
func (a *Ask) whyNot() string {
	switch {
	case a.Scope != rights.Shared:
		return "the build is for one user, and remotes are asked for shared builds only"
	case a.Plan.Outside:
		return "the libraries are the application's own"
	}
	return ""
}

// A transfer ends if no byte arrives for stalledAfter. The rules are checked at an interval.
const (
	stalledAfter = 5 * time.Second
	watchEvery   = 100 * time.Millisecond
	// patientBudget is the least time of a look-up for which no compile waits.
	patientBudget = 5 * time.Second
)

// mayLose returns how much time a fetch that fails may cost the request.
func (a *Ask) mayLose(r *Remote) time.Duration {
	switch {
	case a.Patient:
		return math.MaxInt64
	case a.Estimate > 0:
		return min(r.LoseAtMost, a.Estimate/4)
	}
	return r.LoseAtMost
}

// shortestLook is the time for a look-up that delays no compile noticeably.
const shortestLook = 300 * time.Millisecond

// lookBudget returns how long a look-up may take: a quarter of the compile that it may save, so
// that remotes which are far away are asked where that is worth it.
func (a *Ask) lookBudget(r *Remote) time.Duration {
	longest := min(max(shortestLook, a.Estimate/4), remote.DefaultConnect)
	return min(cmp.Or(r.Connect, longest), a.mayLose(r))
}

// Fetch queries the remotes for the build, and stores the first one that suits. It returns nil if
// there is none. Errors are recorded for Explain, and the next remote is queried.
func (rs *Remotes) Fetch(ctx context.Context, a *Ask) *index.Build {
	all := rs.all()
	if !rs.Asks(a) {
		return nil
	}
	unlock, err := rs.fetching.Lock(ctx, a.Plan.BuildKey)
	if err != nil {
		return nil
	}
	defer unlock()
	a.began = rs.Now()
	for i := range all {
		r := &all[i]
		if !rs.wouldAsk(r, a) {
			continue
		}
		if b := rs.fetchFrom(ctx, r, a); b != nil {
			return b
		}
		if ctx.Err() != nil || rs.Now().Sub(a.began) >= a.mayLose(r) {
			return nil
		}
	}
	return nil
}

// Asks reports whether any remote would be queried.
func (rs *Remotes) Asks(a *Ask) bool {
	return a.whyNot() == "" && slices.ContainsFunc(rs.all(), func(r Remote) bool {
		return rs.wouldAsk(&r, a)
	})
}

func (rs *Remotes) wouldAsk(r *Remote, a *Ask) bool {
	return r.Ask && (a.Refresh || !rs.knownMissing(r, a.Plan.BuildKey) && rs.aside(r) <= 0)
}

// Concerns reports whether a compile begins with a look-up, or with a lease.
func (rs *Remotes) Concerns(a *Ask) bool {
	return rs.Asks(a) || a.whyNot() == "" && slices.ContainsFunc(rs.all(), func(r Remote) bool {
		return r.Ask && r.Lease
	})
}

// knownMissing reports whether the negative cache has the build for this remote.
func (rs *Remotes) knownMissing(r *Remote, build index.BuildKey) bool {
	o, _ := rs.looked.Load().Load(looked{r.Name, build})
	return rs.Now().Before(o.until)
}

// fetchFrom queries one remote, and stores the build if it suits.
func (rs *Remotes) fetchFrom(ctx context.Context, r *Remote, a *Ask) *index.Build {
	budget := a.lookBudget(r)
	if a.Refresh {
		rs.figuresOf(r.Name).trustNext.Store(0)
	}
	if a.Patient {
		budget = max(budget, patientBudget)
	}
	var both sync.WaitGroup
	both.Go(func() { rs.readTrust(ctx, r, budget) })
	cards, err := rs.lookUp(ctx, r, a, budget)
	both.Wait()
	if err != nil {
		rs.note(r, a.Plan.BuildKey, outcome{text: textOf(err)}, isMiss(err) && ctx.Err() == nil)
		if errors.Is(err, remote.ErrUnreachable) {
			rs.tell(r, textOf(err))
		}
		return nil
	}
	why, damaged := "", false
	for _, raw := range cards {
		b, err := rs.take(ctx, r, a, raw)
		if b != nil {
			rs.note(r, a.Plan.BuildKey, outcome{text: "fetched"}, false)
			return b
		}
		if why = ""; err != nil {
			why = textOf(err)
			if errors.Is(err, remote.ErrDamaged) {
				rs.noteDamage(r)
				damaged = true
			}
		}
	}
	if ctx.Err() == nil { // otherwise the request's end is the cause
		rs.note(r, a.Plan.BuildKey, outcome{text: why, bad: why != "", damaged: damaged}, true)
	}
	return nil
}

// lookUp returns the card of the build, or the cards of builds that answer the same request.
func (rs *Remotes) lookUp(ctx context.Context, r *Remote, a *Ask,
	budget time.Duration) ([][]byte, error) {
	began := rs.Now()
	cards, err := rs.Client.Look(ctx, r.Name,
		remote.BuildKey(portable.Hash(a.Plan.BuildKey)), budget)
	if left := budget - rs.Now().Sub(began); errors.Is(err, remote.ErrMissing) && left > 0 {
		other, why := rs.Client.Look(ctx, r.Name,
			remote.RequestKey(portable.Hash(a.Plan.RequestKey)), left)
		if why == nil {
			return other, nil
		}
		if !errors.Is(why, remote.ErrUnsupported) { // remotes that cannot list are not an error
			err = why
		}
	}
	return cards, err
}

// take fetches and stores the build of a card, if it suits. It returns neither build nor error if
// the build is stored already.
func (rs *Remotes) take(ctx context.Context, r *Remote, a *Ask, raw []byte) (*index.Build, error) {
	im := &claims.Import{Card: raw, Remote: r.Name, Trust: r.Trust, Name: a.Name,
		Request: a.Plan.RequestKey}
	peer := request.Peer{UID: rs.UID}
	out, err := rs.Import(ctx, peer, im, nil)
	switch {
	case err != nil:
		return nil, err
	case out.Outcome != claims.HitHere:
		return nil, rs.refused(r, out)
	case !out.Wanted:
		return nil, nil
	}
	c := out.Card
	var sizes []int64
	for _, f := range c.Config.Files {
		sizes = append(sizes, f.Size)
	}
	reservation, err := rs.Store.Reserve(ctx, rs.UID, true, sizes...)
	defer func() { reservation.Release() }()
	if now, why := rs.Store.Bounds(); err == nil {
		err = cmp.Or(why, store.Fits("the build", c.Config.Size(), now.Free))
	}
	if err != nil && rs.keepPartial(nil) {
		reservation.Release()
		return rs.take(ctx, r, a, raw) // again, because the partial build took space, too
	}
	if err != nil {
		return nil, err
	}
	dir, remove, err := rs.Store.Stage("fetch-")
	if err != nil {
		return nil, err
	}
	defer remove()
	files, err := stageFiles(dir, c.Config.Files)
	defer func() { remote.CloseAll(files) }()
	if err != nil {
		return nil, err
	}
	if err := rs.transfer(ctx, r, a, c, files); err != nil {
		if a.Patient {
			rs.keepPartial(&partial{a.Plan.BuildKey, files, reservation})
			files, reservation = nil, nil
		}
		return nil, err
	}
	for i, f := range c.Config.Files {
		file, err := os.Open(files[i].Name()) // reopened for reading only, as a put requires
		if err != nil {
			return nil, err
		}
		defer file.Close()
		im.Files = append(im.Files, claims.PutFile{Name: f.Name, File: file})
	}
	remote.CloseAll(files)
	if rs.isWritten(im.Files) {
		disk, _ := store.SpaceOf(sizes...)
		reservation.Written = disk - store.ManifestNeed
		if err := reservation.Resize(ctx, true, sizes...); err != nil {
			return nil, err
		}
		im.Dir, im.Reservation = dir, reservation
	}
	if out, err = rs.Import(ctx, peer, im, nil); err != nil {
		return nil, err
	}
	if out.Build == nil {
		return nil, rs.refused(r, out)
	}
	return out.Build, nil
}

// refused counts a refused card or build, and returns the reason as an error.
func (rs *Remotes) refused(r *Remote, out *claims.Imported) error {
	if out.Outcome == claims.Refused {
		rs.figuresOf(r.Name).refused.Add(1)
		rs.figuresOf(r.Name).refusal.Store(&outcome{text: "refused: " + out.Text, at: rs.Now()})
	}
	text := fmt.Sprintf("%s: %s", out.Outcome, out.Text)
	if out.Damaged {
		return &remote.Error{Class: "damaged", Remote: r.Name, Text: text}
	}
	return errors.New(text)
}

func stageFiles(dir string, all []portable.File) (files []*os.File, err error) {
	for i := range all {
		path := filepath.Join(dir, filepath.FromSlash(all[i].Name))
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return files, err
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
		if err != nil {
			return files, err
		}
		files = append(files, f)
	}
	return files, nil
}

// isWritten reports whether the helper cannot write to the files any more, so that they need not be
// copied. The daemon does not trust the helper: it might change files after the check, or allocate
// more of the disk than their sizes say. It runs as another user, so it cannot open them again.
func (rs *Remotes) isWritten(files []claims.PutFile) bool {
	return !slices.ContainsFunc(files, func(f claims.PutFile) bool {
		var st unix.Stat_t
		alone, err := rs.Store.Blobs().MakeReadOnly(f.File)
		if err == nil {
			err = unix.Fstat(int(f.File.Fd()), &st)
		}
		return err != nil || !alone || st.Blocks*512 > st.Size+st.Size/16+1<<20
	})
}

// transfer fetches the files of a build. It stops when the transfer no longer saves time, see
// stopLoss.
func (rs *Remotes) transfer(ctx context.Context, r *Remote, a *Ask, c *portable.Card,
	files []*os.File) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	s := &stopLoss{began: rs.Now(), ask: a, may: a.mayLose(r)}
	s.last.Store(&arrival{s.began, remote.Progress{Total: c.Config.Size()}})
	ended := make(chan struct{})
	defer func() { <-ended }()
	ctx, done := context.WithCancel(ctx)
	defer done()
	go func() {
		defer close(ended)
		tick := time.NewTicker(watchEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if why := s.whyStop(rs.Now()); why != "" {
					stop(errors.New(why))
					return
				}
			}
		}
	}()
	seeds := rs.seeds(ctx, c)
	defer remote.CloseAll(seeds)
	if p := rs.partial.Swap(nil); p != nil {
		defer p.release()
		if p.build == a.Plan.BuildKey {
			seeds = append(seeds, p.files...)
		}
	}
	p, err := rs.Client.Fetch(ctx, r.Name, remote.Fetch{Manifest: c.Build, Files: files,
		Seeds: seeds, Progress: func(p remote.Progress) { s.arrived(rs.Now(), p) }})
	f := rs.figuresOf(r.Name)
	f.fetched.Add(p.Wire)
	f.seeds.Add(p.Seeds)
	if err == nil {
		f.hits.Add(1)
		return nil
	}
	f.lost.Add(int64(rs.Now().Sub(s.began)))
	if cause := context.Cause(ctx); cause != nil && cause != context.Canceled {
		return fmt.Errorf("given up: %w", cause)
	}
	return err
}

// Bounds of the seeds of each file and of a build, because the helper reads them all.
const (
	seedsOfFile = 2
	maxSeeds    = 16
)

// partial is what arrived of a build whose fetch failed, although no compile waited for it. Its
// files, which have no names any more, are seeds of the next fetch, and stay reserved until then.
type partial struct {
	build       index.BuildKey
	files       []*os.File
	reservation *store.Reservation
}

func (p *partial) release() {
	remote.CloseAll(p.files)
	p.reservation.Release()
}

// keepPartial replaces the last partial build, and reports whether there was one; nil only removes
// it.
func (rs *Remotes) keepPartial(p *partial) bool {
	old := rs.partial.Swap(p)
	if old != nil {
		old.release()
	}
	return old != nil
}

// seeds opens files of this machine that share bytes with the build, so that these need not be
// transferred.
func (rs *Remotes) seeds(ctx context.Context, c *portable.Card) (files []*os.File) {
	for _, sketch := range c.Config.Sketches {
		if n := min(seedsOfFile, maxSeeds-len(files)); n > 0 && len(sketch) > 0 {
			files = append(files, rs.Store.Packer().Seeds(ctx, sketch, n)...)
		}
	}
	return files
}

// stopLoss decides when a transfer no longer saves time.
type stopLoss struct {
	began time.Time
	ask   *Ask
	may   time.Duration           // the time that the request may lose
	last  atomic.Pointer[arrival] // the last arrival of bytes
}

type arrival struct {
	at time.Time
	remote.Progress
}

func (s *stopLoss) arrived(at time.Time, p remote.Progress) {
	if p.Done == s.last.Load().Done {
		return
	}
	s.last.Store(&arrival{at, p})
	if s.ask.Progress != nil {
		s.ask.Progress(p.Done, p.Total, s.left(at))
	}
}

// left returns the time that the rest takes at the average rate so far, 0 if unknown.
func (s *stopLoss) left(now time.Time) time.Duration {
	p := s.last.Load()
	if p.Done <= 0 {
		return 0
	}
	return time.Duration(float64(now.Sub(s.began)) * float64(p.Total-p.Done) / float64(p.Done))
}

// whyStop returns why the transfer is stopped, "" if it continues. A transfer that is expected to
// take less than a quarter of the compile may take longer than LoseAtMost.
func (s *stopLoss) whyStop(now time.Time) string {
	spent, p := now.Sub(s.ask.began), s.last.Load()
	left := s.left(now)
	whole, estimate := spent+left, s.ask.Estimate
	onCourse := p.Done > 0 && estimate > 0 && whole <= estimate/4 && now.Sub(p.at) < time.Second
	switch {
	case now.Sub(p.at) >= stalledAfter:
		return fmt.Sprintf("no byte arrived for %s", stalledAfter)
	case s.ask.Patient:
		return ""
	case estimate > 0 && p.Done > 0 && whole > estimate:
		return fmt.Sprintf("it would take %s, and the compile %s", whole.Round(time.Second/10),
			estimate.Round(time.Second/10))
	case spent >= s.may && !onCourse:
		return fmt.Sprintf("%s were spent, and a request may lose %s", spent.Round(time.Second/10),
			s.may.Round(time.Second/10))
	}
	return ""
}

// textOf returns an error's text without the remote's name, which is shown beside it.
func textOf(err error) string {
	if e, is := errors.AsType[*remote.Error](err); is {
		return e.Text
	}
	return err.Error()
}
