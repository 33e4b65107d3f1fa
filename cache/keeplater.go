package cache

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/refusal"
)

// keptLater is a result of the daemon's own that was answered before there was room for it. Until its turn comes it is the view that it was
// answered from, which is in no account, as that of any other result that is not kept, and would be there for as long without it. It is a job,
// until it is a build or is given up. Who asks for the same meanwhile is given the same view, at once; who asks later the build.
type keptLater struct {
	*queued
	job      *job // made it, and has ended
	about    jobFacts
	build    *index.Build // what will be published: nobody else has it
	answered *compiled
	hashed   map[string]cas.Hashed // all of its files
	sizes    []int64
	models   *Request    // with the models' files, of which copies are to be kept; nil: none are
	stamps   []cas.Stamp // of these files
}

// keepLater answers with a result for which there is no room now, and has it kept as soon as there is some: why says that there is none. It is
// nil if it cannot be queued.
func (j *job) keepLater(ctx context.Context, b *index.Build, out string, hashed map[string]cas.Hashed, sizes []int64, why error) *compiled {
	k := &keptLater{job: j, sizes: sizes, about: j.facts()}
	k.about.ID, k.about.files, k.about.keeps, k.about.Why = "", 0, true, "compiled and answered; to be kept as soon as there is room"
	var err error
	if k.hashed, err = j.hashAll(ctx, b, out, hashed); err == nil {
		err = k.holdModels()
	}
	if err != nil {
		j.c.log.Info("a result is not kept later", "model", b.ModelName, "why", err)
		return nil
	}
	disk, _ := needOf(sizes...)
	written := writtenOf(b, sizes)
	var ok bool
	if k.queued, ok = j.c.queue(j.c.reports.owners.of(j.request.Peer.UID), disk, written, 1+len(k.stamps), why); !ok {
		k.closeModels()
		return nil
	}
	k.build = k.ofItsOwn(b)
	if k.answered, err = j.c.aloneFor(b, out, "not kept yet: "+why.Error()); err != nil {
		k.close()
		return nil // whoever tries without says why
	}
	j.c.views.Want(k.answered.alone, true)
	j.c.happened(eventUnkept(b, EventUnkeptYet, "it is kept as soon as there is room: %s", textOf(why)))
	j.c.waiting.add(k)
	who := asking{uid: j.request.Peer.UID, name: j.request.Name, idle: j.anew != ""}
	// A job of its own: the one that made the result ends now, and with it the wait of those who asked.
	k.answered.later, _, err = j.c.flights.find(flightKey{build: b.BuildKey, scope: j.scope, alone: newID()}, who, nil, func() (runner, error) { return k, nil })
	if err != nil { // the daemon stops
		k.unkept(refusal.New(refusal.NoSpace, err, "there was no room before the daemon stopped"))
	}
	return k.answered
}

// hashAll completes what was hashed ahead: later others have the files too, and what they hold then has to be what was checked.
func (j *job) hashAll(ctx context.Context, b *index.Build, out string, hashed map[string]cas.Hashed) (map[string]cas.Hashed, error) {
	all := make(map[string]cas.Hashed, len(b.Files))
	for _, f := range b.Files {
		h := hashed[f.Name]
		if h == (cas.Hashed{}) {
			var err error
			if h, err = j.c.cas.HashAhead(ctx, filepath.Join(out, filepath.FromSlash(f.Name))); err != nil {
				return nil, err
			}
		}
		if h == (cas.Hashed{}) {
			return nil, errors.New("somebody could still write it")
		}
		all[f.Name] = h
	}
	return all, nil
}

// ofItsOwn copies a build's record, which those who are answered now have as well.
func (k *keptLater) ofItsOwn(b *index.Build) *index.Build {
	own := *b
	own.Files, own.Members, own.Warnings = slices.Clone(b.Files), slices.Clone(b.Members), slices.Clone(b.Warnings)
	if k.models == nil { // what is known of paths now need not be held open
		own.Source = k.sourceNow(0)
		for i := 1; i < len(own.Members); i++ {
			own.Members[i].Source = k.sourceNow(i)
		}
	}
	return &own
}

// sourceNow says where a model will be found again whose files are not to be copied.
func (k *keptLater) sourceNow(member int) index.Source {
	j := k.job
	how := j.c.settings.Load().keepSource
	if how == KeepNone {
		return index.Source{Why: whySwitchedOff}
	}
	if member < len(j.sources) && j.sources[member].Kind == index.SourceCopy {
		return j.sources[member]
	}
	return j.reference(context.Background(), member)
}

// holdModels keeps descriptors of the models' files, if copies of them are to be kept.
func (k *keptLater) holdModels() (err error) {
	j := k.job
	if j.c.settings.Load().keepSource != KeepCopy {
		return nil
	}
	if k.models, err = j.request.own(); err != nil {
		return err
	}
	for _, f := range k.models.descriptors() {
		stamp, err := cas.StampOf(f)
		if err != nil {
			k.closeModels()
			return err
		}
		k.stamps = append(k.stamps, stamp)
	}
	return nil
}

func (k *keptLater) closeModels() {
	if k.models != nil {
		k.models.close()
	}
}

// close is the end of it, however it came.
func (k *keptLater) close() {
	k.leave()
	k.closeModels()
}

func (k *keptLater) facts() jobFacts { return k.about }

// run keeps it when its turn comes, or gives it up.
func (k *keptLater) run(ctx context.Context, f *flight) (*compiled, error) {
	f.tell(phaseNoRoom)
	err := k.keep(ctx, f)
	if err == nil {
		k.job.c.waiting.remove(k) // it is found in the index from now on
		k.job.c.views.Want(k.answered.alone, false)
		k.close()
		return &compiled{build: k.build}, nil
	}
	if ctx.Err() != nil {
		err = refusal.New(refusal.NoSpace, nil, "there was no room before its job was cancelled")
	}
	if k.job.c.ctx.Err() != nil {
		err = refusal.New(refusal.NoSpace, nil, "there was no room before the daemon stopped")
	}
	k.unkept(err)
	return nil, err
}

// unkept gives it up.
func (k *keptLater) unkept(why error) {
	c := k.job.c
	c.waiting.remove(k)
	c.views.Want(k.answered.alone, false)
	k.close()
	c.notKept(k.answered.build, why)
}

// keep waits for room, and then does what the job would have done.
func (k *keptLater) keep(ctx context.Context, f *flight) error {
	j := k.job
	nobody := func() bool { return false } // waits for it: who asks is answered
	room, err := k.await(ctx, nil, nobody, func() (*reservation, error) {
		room := &reservation{c: j.c, user: j.request.Peer.UID, written: writtenOf(k.build, k.sizes)}
		err := room.resize(ctx, false, k.sizes...)
		if errors.Is(err, errUserFull) { // what its user has too much goes in a moment, perhaps
			err = room.resize(ctx, true, k.sizes...)
		}
		return room, err
	})
	if err != nil {
		return err
	}
	defer room.release()
	k.hasRoom()
	f.tell("storing")
	hold := j.c.cas.Hold()
	defer j.c.forms.Release(hold)
	k.keepModels(ctx, hold)
	v, b := k.answered.alone, k.build
	err = j.c.putEach(ctx, b, func(name string) (cas.Digest, int64, error) {
		return hold.PutLinked(ctx, filepath.Join(v.Path(), v.ID(), filepath.FromSlash(name)), k.hashed[name])
	})
	if err != nil {
		return storeError(err, b.ModelName)
	}
	j.c.views.Linked(v, b, j.c.now().Add(freshFor))
	j.c.forms.Release(hold) // what others keep packed, and was stored whole, counts as that before the place is given back
	room.release()
	j.published(ctx, b, "; kept "+time.Since(k.since).Round(time.Millisecond).String()+" after it was answered, when there was room")
	return nil
}

// keepModels sees to it that copies of the models are there, where the build is to refer to such.
func (k *keptLater) keepModels(ctx context.Context, hold *cas.Hold) {
	copied := make(map[*os.File]index.File)
	k.build.Source = k.sourceThen(ctx, 0, k.build.Source, hold, copied)
	for i := 1; i < len(k.build.Members); i++ {
		k.build.Members[i].Source = k.sourceThen(ctx, i, k.build.Members[i].Source, hold, copied)
	}
}

func (k *keptLater) sourceThen(ctx context.Context, member int, known index.Source, hold *cas.Hold, copied map[*os.File]index.File) index.Source {
	if k.models == nil && (known.Kind != index.SourceCopy || keepAll(ctx, hold, known.Files)) {
		return known
	}
	if k.models == nil {
		return k.job.keptOr(known, errors.New("its copy is not in the store any more"), member)
	}
	known, err := k.copyModel(ctx, member, hold, copied)
	return k.job.keptOr(known, err, member)
}

func (k *keptLater) copyModel(ctx context.Context, member int, hold *cas.Hold, copied map[*os.File]index.File) (index.Source, error) {
	j, r := k.job, k.models.model(member)
	if member < len(j.sources) && j.sources[member].Kind == index.SourceCopy && keepAll(ctx, hold, j.sources[member].Files) {
		return j.sources[member], nil // compiled from there
	}
	for i, f := range k.models.descriptors() {
		if now, err := cas.StampOf(f); err != nil || now != k.stamps[i] {
			return index.Source{}, errors.New("it changed while there was no room for it")
		}
	}
	s := index.Source{Kind: index.SourceCopy}
	for _, location := range append([]string{""}, j.copies[member].locations...) {
		from := r.External[location]
		if location == "" {
			from = r.Graph
		}
		if from == nil {
			return s, &os.PathError{Op: "copy", Path: location, Err: os.ErrNotExist}
		}
		f, there := copied[from]
		if !there { // else it was copied for another of the group: the place for it is taken, and there is none for one more
			var err error
			if f.Digest, f.Size, err = hold.PutFile(ctx, from); err != nil {
				return s, err
			}
			copied[from] = f
		}
		f.Name = location
		s.Files = append(s.Files, f)
	}
	return s, nil
}

// waitingFor gives what was compiled in this scope for the same request, and answered, and waits for room, or will never have any; nil: there is no such
// thing, or it is none for this request.
func (c *Cache) waitingFor(r *Request, p *plan, rc *runtimeContent, scope string) *compiled {
	key := flightKey{build: p.buildKey, scope: scope}
	result := c.waiting.find(key)
	if result == nil {
		result = c.neverFitting.find(key, c.settings.Load())
	}
	if result == nil || !p.exactly(result.build) || c.barred(r, rc, result.build) != "" || !result.alone.There() {
		return nil
	}
	c.views.GivenAgain(result.alone)
	return result
}

// keptSince gives the build that a result has become, for who came too late for the view that it was answered from; nil: none.
func (c *Cache) keptSince(b *index.Build) *index.Build {
	builds, err := c.index.Lookup(b.RequestKey, b.Scope)
	if err != nil {
		return nil // what it is asked for has failed already
	}
	for i := range builds {
		if builds[i].BuildKey == b.BuildKey && builds[i].Created.Equal(b.Created) {
			return &builds[i]
		}
	}
	return nil
}

// answerWaiting answers a request that has nothing compiled with a result that waits to be kept. The answer is nil where none does.
func (c *Cache) answerWaiting(ctx context.Context, r *Request, id identity, p *plan, rc *runtimeContent, phase func(string)) (*Answer, error) {
	_, scope := c.flightKey(r, id, p)
	result := c.waitingFor(r, p, rc, scope)
	if result == nil {
		return nil, nil
	}
	a, err := c.waited(ctx, r, p, result, phase)
	if err != nil {
		return nil, err
	}
	a.Why = result.why
	return a, nil
}

// waitingResults are the results that wait to be kept and can be had already: the latest of each kind.
type waitingResults struct {
	mu  sync.Mutex
	all map[flightKey]*keptLater // guarded by mu
}

func (k *keptLater) key() flightKey { return flightKey{build: k.build.BuildKey, scope: k.job.scope} }

func (w *waitingResults) add(k *keptLater) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all == nil {
		w.all = make(map[flightKey]*keptLater)
	}
	w.all[k.key()] = k
}

func (w *waitingResults) remove(k *keptLater) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all[k.key()] == k {
		delete(w.all, k.key())
	}
}

// find gives what was answered already; nil: nothing of that kind waits.
func (w *waitingResults) find(key flightKey) *compiled {
	w.mu.Lock()
	defer w.mu.Unlock()
	k := w.all[key]
	if k == nil {
		return nil
	}
	return &compiled{build: k.answered.build, alone: k.answered.alone, why: k.answered.why, found: true}
}

// has tells whether one of a request's waits.
func (w *waitingResults) has(key index.RequestKey) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, k := range w.all {
		if k.build.RequestKey == key {
			return true
		}
	}
	return false
}
