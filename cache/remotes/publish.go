package remotes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/trust"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

// Bounds of the queue of builds to publish, and of retries.
const (
	maxQueued    = 256
	publishTries = 3
	firstBackoff = 2 * time.Second
	busyPause    = 250 * time.Millisecond
	queueKey     = "publish:queue" // key of the memo that persists the queue
	epochKey     = "publish:epoch" // key of the memo with the last epoch of renewed cards
	renewEvery   = time.Hour       // interval of checks for a new epoch

	// validFor is how long a card is valid after signing: see the lifecycle rules in
	// doc/sharing.md.
	validFor = 60 * 24 * time.Hour
)

// NotePublished queues a stored build for the remotes that are configured for publishing. If it was
// fetched from a remote, its card is renewed there.
func (rs *Remotes) NotePublished(b *index.Build) {
	fetched := b.Scope == rights.Shared && b.Imported.Remote != ""
	if !rs.publishes() || rs.mayLeave(b) != "" && !fetched {
		rs.endLease(b.BuildKey, nil)
		return
	}
	rs.mu.Lock()
	rs.queue = append(rs.queue, b.ID)
	rs.queue = rs.queue[max(0, len(rs.queue)-maxQueued):]
	rs.saveQueue()
	rs.mu.Unlock()
	select {
	case rs.wake <- struct{}{}:
	default:
	}
}

// saveQueue persists the queue, best effort. The caller holds mu.
func (rs *Remotes) saveQueue() {
	if err := memo.Save(&rs.Store.Index().Memos, queueKey, rs.queue); err != nil {
		rs.Log.Warn("the queue of builds to publish is not kept over a restart", "error", err)
	}
}

// Run publishes queued builds, and renews the cards of builds in use, until the context ends.
func (rs *Remotes) Run(ctx context.Context) {
	if rs.Client == nil {
		return
	}
	rs.mu.Lock()
	before, _ := memo.Recall[[]index.BuildID](&rs.Store.Index().Memos, queueKey)
	rs.queue = append(before, rs.queue...)
	rs.mu.Unlock()
	var trusting sync.WaitGroup
	trusting.Go(func() { rs.keepTrust(ctx) })
	defer trusting.Wait()
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		rs.renewUsed(ctx)
		rs.mu.Lock()
		var next index.BuildID
		some := len(rs.queue) > 0
		if some {
			next = rs.queue[0]
		}
		rs.mu.Unlock()
		if !some {
			select {
			case <-ctx.Done():
				return
			case <-rs.wake:
			case <-tick.C:
				rs.keepPartial(nil) // after an hour its space is worth more
			}
			continue
		}
		rs.publishQueued(ctx, next)
	}
}

// publishQueued publishes one build to all remotes, and removes it from the queue.
func (rs *Remotes) publishQueued(ctx context.Context, id index.BuildID) {
	b, err := rs.Store.Index().Get(id)
	for _, r := range rs.all() {
		if err != nil || !r.Publish { // on an error the build was removed in the meantime
			continue
		}
		// other machines of the fleet wait for a leased build
		for rs.Busy() && !rs.holdsLease(b.BuildKey) {
			if sleep(ctx, busyPause) != nil {
				return
			}
		}
		pause := firstBackoff
		for try := 1; ; try++ {
			_, why := rs.Publish(ctx, &r, &b, nil)
			if ctx.Err() != nil {
				return
			}
			if why == nil {
				break
			}
			if try == publishTries {
				rs.notPublished(&r, &b, why)
				break
			}
			if e := (*remote.Error)(nil); errors.As(why, &e) {
				pause = max(pause, min(e.RetryAfter, time.Minute))
			}
			if sleep(ctx, pause) != nil {
				return
			}
			pause *= 4
		}
	}
	rs.mu.Lock()
	rs.queue = slices.DeleteFunc(rs.queue, func(one index.BuildID) bool { return one == id })
	rs.saveQueue()
	rs.mu.Unlock()
	rs.endLease(b.BuildKey, nil)
}

func (rs *Remotes) holdsLease(build index.BuildKey) bool {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return rs.leases[build] != nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

func (rs *Remotes) notPublished(r *Remote, b *index.Build, why error) {
	rs.figuresOf(r.Name).failed.Add(1)
	rs.Log.Warn("build not published", "remote", r.Name, "model", b.ModelName, "error", why)
	rs.Store.RecordEvent(event.Of(b, event.NotPublished, "to remote %s: %v", r.Name, why))
	reason := why.Error()
	rs.figuresOf(r.Name).failure.Store(&reason)
}

// Published is the outcome of publishing a build.
type Published string

// Exists: the remote has a card of the build already.
const (
	Created Published = "published"
	Exists  Published = "it is there already"
)

// Publish copies a build to a remote: first its blobs, and then its card, signed by this daemon.
func (rs *Remotes) Publish(ctx context.Context, r *Remote, b *index.Build,
	progress func(request.Progress)) (Published, error) {
	why := rs.mayLeave(b)
	if why == private {
		return "", errors.New(why)
	}
	last, _ := rs.looked.Load().Load(looked{r.Name, b.BuildKey})
	there, err := rs.renew(ctx, r, b)
	lacks := errors.Is(err, remote.ErrMissing)
	switch {
	case err != nil && !lacks:
		return "", err
	case there && !last.bad: // a bad card may lack blobs, so they are put again
		rs.figuresOf(r.Name).failure.Store(nil)
		return Exists, nil
	case why != "":
		return "", errors.New(why)
	}
	signer, err := rs.signer(r, b.BuildKey)
	if err != nil {
		return "", err
	}
	dir, remove, err := rs.Store.Stage("publish-")
	if err != nil {
		return "", err
	}
	defer remove()
	card, err := rs.pack(ctx, b, signer, dir, progress)
	if err != nil {
		return "", err
	}
	sent, err := rs.putBlobs(ctx, r, dir, last.damaged, progress)
	if err != nil {
		return "", err
	}
	rs.figuresOf(r.Name).sent.Add(sent.Bytes)
	put, err := rs.putCard(ctx, r, b, card, lacks || last.damaged)
	if err != nil {
		return "", err
	}
	rs.Forget(b.BuildKey)
	rs.figuresOf(r.Name).failure.Store(nil)
	if put == remote.Exists {
		return Exists, nil
	}
	rs.figuresOf(r.Name).published.Add(1)
	rs.Store.RecordEvent(event.Of(b, event.Published, "to remote %s, signed by %.16s",
		r.Name, signer.ID))
	return Created, nil
}

// putCard puts a card, unless the remote keeps the one that it has.
func (rs *Remotes) putCard(ctx context.Context, r *Remote, b *index.Build, card *portable.Card,
	lacks bool) (put remote.Put, err error) {
	keys := keysOf(b)
	for range 3 { // retry, because another publisher may replace the card at the same time
		cards, err := rs.Client.Look(ctx, r.Name, remote.BuildKey(keys.Build), publishBudget)
		if err == nil {
			if !lacks && rs.keeps(r, cards[0], card) {
				return remote.Exists, nil
			}
			keys.Over = portable.DigestOf(cards[0])
		} else if !isMiss(err) {
			return "", err
		}
		put, err = rs.Client.PutCard(ctx, r.Name, keys, card.Raw)
		if err != nil || put != remote.Exists {
			return put, err
		}
	}
	return remote.Exists, nil
}

// keeps reports whether the card at the remote is kept instead of a new one. It is replaced if all
// keys that signed it are revoked. A card with an equal manifest is replaced as well if this daemon
// signed it, or if no key did that is trusted for the remote, as after a key was replaced.
func (rs *Remotes) keeps(r *Remote, there []byte, card *portable.Card) bool {
	old, err := portable.ParseCard("card", there)
	if err != nil {
		return true
	}
	same, own := old.Digest == card.Digest, card.Signers()[0]
	keys, err := portable.ReadKeys(r.Trust)
	if same && err == nil && len(keys) > len(trust.Roots(keys)) {
		if _, _, err := rs.Trust.Of(keys).Verify(old, rs.Now()); err != nil {
			return false
		}
	}
	return slices.ContainsFunc(old.Signers(), func(id string) bool {
		return rs.revoked(r, id, portable.Hash{}) == "" && !(same && id == own)
	})
}

// renew puts the card of a build in use into the current epoch, and signs it again if this daemon
// had signed it. It reports whether the remote has a valid card of the build, and fails with
// ErrMissing if the remote has the card but not all blobs.
func (rs *Remotes) renew(ctx context.Context, r *Remote, b *index.Build) (bool, error) {
	keys := keysOf(b)
	cards, err := rs.Client.Look(ctx, r.Name, remote.BuildKey(keys.Build), publishBudget)
	if isMiss(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	raw, now := cards[0], rs.Now()
	card, err := portable.ParseCard("card", raw)
	if err != nil {
		return false, nil // revoked or invalid; publishing replaces it
	}
	if signer, err := r.signer(); err != nil {
		return true, nil
	} else if says, err := signer.Verify(card, now); err == nil &&
		rs.revoked(r, signer.ID, keys.Build) == "" {
		if remote.Epoch(says.Issued) != remote.Epoch(now) {
			says.Issued, says.NotAfter = now.UTC().Truncate(time.Second), expiry(now)
			raw = signer.Sign(card, *says)
		}
	} else if out, err := rs.Import(ctx, request.Peer{UID: rs.UID},
		&claims.Import{Card: raw, Remote: r.Name, Trust: r.Trust, Name: b.ModelName},
		nil); err != nil || out.Key == "" {
		return false, err
	}
	_, err = rs.Client.Renew(ctx, r.Name, keys, raw)
	return err == nil, err
}

// isMiss reports whether the remote answered, and has no card that can be read.
func isMiss(err error) bool {
	return errors.Is(err, remote.ErrMissing) || errors.Is(err, remote.ErrRefused) ||
		errors.Is(err, remote.ErrDamaged)
}

// renewUsed renews the cards of builds that this machine uses, once in each epoch.
func (rs *Remotes) renewUsed(ctx context.Context) {
	now, memos := rs.Now(), &rs.Store.Index().Memos
	if done, _ := memo.Recall[int64](memos, epochKey); done == remote.Epoch(now) ||
		!rs.publishes() {
		return
	}
	var used []index.Build
	err := rs.Store.Index().Each(ctx, func(b index.Build) error {
		at, _ := rs.Store.Index().Uses.LastUse(b.ID)
		if b.Scope == rights.Shared && now.Sub(at) < remote.EpochLength {
			used = append(used, b)
		}
		return nil
	})
	for i := range used {
		for _, r := range rs.all() {
			if r.Publish && !errors.Is(err, remote.ErrUnreachable) && ctx.Err() == nil {
				_, err = rs.renew(ctx, &r, &used[i])
			}
		}
	}
	// otherwise all are renewed later
	if ctx.Err() == nil && !errors.Is(err, remote.ErrUnreachable) {
		err = memo.Save(memos, epochKey, remote.Epoch(now))
	}
	if ctx.Err() == nil && err != nil {
		rs.Log.Info("builds are not renewed at remotes yet", "error", err)
	}
}

func (rs *Remotes) publishes() bool {
	return slices.ContainsFunc(rs.all(), func(r Remote) bool { return r.Publish })
}

func keysOf(b *index.Build) remote.CardKeys {
	return remote.CardKeys{Build: portable.Hash(b.BuildKey),
		Requests: []portable.Hash{portable.Hash(b.RequestKey)}}
}

// expiry returns the expiry date of a card that is signed now.
func expiry(now time.Time) time.Time { return now.Add(validFor).UTC().Truncate(time.Second) }

// signer reads the key that signs published cards.
func (r *Remote) signer() (*portable.Signer, error) {
	if r.SigningKey == "" {
		return nil,
			errors.New("no signing_key is configured: builds are published with a signature only")
	}
	signer, err := portable.ReadSigner(r.SigningKey)
	if err != nil {
		return nil, fmt.Errorf("signing_key: %w", err)
	}
	return signer, nil
}

// signer returns the key that signs the build for the remote, unless either is revoked.
func (rs *Remotes) signer(r *Remote, build index.BuildKey) (*portable.Signer, error) {
	signer, err := r.signer()
	if err != nil {
		return nil, err
	}
	if why := rs.revoked(r, signer.ID, portable.Hash{}); why != "" {
		return nil, fmt.Errorf("%s; make another key (epcachectl trust keygen NAME), set "+
			"signing_key to it, and trust it where the builds are fetched", why)
	}
	if why := rs.revoked(r, "", portable.Hash(build)); why != "" {
		return nil, errors.New(why)
	}
	return signer, nil
}

// pack writes the blobs of a build below the directory, and returns its card.
func (rs *Remotes) pack(ctx context.Context, b *index.Build, signer *portable.Signer, dir string,
	progress func(request.Progress)) (*portable.Card, error) {
	reply, view, err := rs.Export(ctx, b)
	if err != nil {
		return nil, err
	}
	defer view.Close()
	out := &portable.Build{Signer: signer,
		Says: portable.Predicate{MachineClass: reply.MachineClass,
			CompileSeconds: reply.CompileSeconds, Issued: rs.Now(), NotAfter: expiry(rs.Now())}}
	if err := json.Unmarshal(reply.Config, &out.Config); err != nil {
		return nil, err
	}
	done, total := int64(0), int64(0)
	root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", view.Fd()))
	if err != nil {
		return nil, err
	}
	defer root.Close()
	for _, f := range reply.Files {
		file, err := root.Open(filepath.Join(filepath.Dir(reply.Graph), f.Name))
		if err != nil {
			return nil, err
		}
		defer file.Close()
		total += f.Size
		out.Files = append(out.Files, portable.Source{Name: f.Name, Size: f.Size, From: file})
	}
	if progress != nil {
		out.Copied = func(n int) {
			done += int64(n)
			progress(request.Progress{Phase: "reading", Done: done, Total: total})
		}
	}
	reservation, err := rs.Store.Reserve(ctx, rs.UID, false, total)
	if err != nil {
		return nil, err
	}
	defer reservation.Release()
	w, err := portable.Create(dir)
	if err != nil {
		return nil, err
	}
	card, err := w.Add(ctx, out)
	return card, errors.Join(err, w.Close())
}

// putBlobs uploads all blobs below the directory, with again also those that the remote has.
func (rs *Remotes) putBlobs(ctx context.Context, r *Remote, dir string, again bool,
	progress func(request.Progress)) (remote.Sent, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "blobs", "sha256", "*"))
	if err != nil {
		return remote.Sent{}, err
	}
	var blobs []remote.Blob
	defer func() {
		for _, b := range blobs {
			_ = b.File.Close() // opened for reading, so no data can be lost
		}
	}()
	for _, path := range paths {
		file, err := os.Open(path)
		if err != nil {
			return remote.Sent{}, err
		}
		one := remote.Blob{File: file}
		blobs = append(blobs, one)
		b := &blobs[len(blobs)-1]
		b.Again = again
		if err := b.Digest.UnmarshalText([]byte("sha256:" + filepath.Base(path))); err != nil {
			return remote.Sent{}, err
		}
		info, err := file.Stat()
		if err != nil {
			return remote.Sent{}, err
		}
		b.Size = info.Size()
	}
	return rs.Client.PutBlobs(ctx, r.Name, blobs, func(p remote.Progress) {
		if progress != nil {
			progress(request.Progress{Phase: "publishing", Done: p.Done, Total: p.Total})
		}
	})
}
