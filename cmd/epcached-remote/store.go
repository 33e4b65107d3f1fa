package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"path"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

// The objects of a remote, below its URL. An epoch is 30 days; a look-up reads the current and the
// previous one, and lifecycle rules remove objects that are older than the days in brackets:
//
//	v1/oci-layout
//	v1/blobs/sha256/<hex>                        content-addressed; touched while in use (120)
//	v1/builds/<epoch>/<build key>                card, create-only (75)
//	v1/requests/<epoch>/<request key>/<build key>  the same card, create-only (75)
//	v1/leases/<build key>                        create-only, taken over by If-Match (1)
//	v1/trust                                     signed by the root key
//	v1/check/<random>                            of `remote check` (1)
const (
	layoutName = "v1/oci-layout"
	layoutText = `{"imageLayoutVersion":"1.0.0"}`
	blobsName  = "v1/blobs/sha256/"
	trustName  = "v1/trust"
	checkName  = "v1/check/"

	// touchAfter is the age from which a blob that is pushed again is touched, because blobs expire
	// after 120 days and cards after 60.
	touchAfter = 45 * 24 * time.Hour
)

func buildName(epoch int64, key portable.Hash) string {
	return fmt.Sprintf("v1/builds/%d/%s", epoch, key)
}

func requestName(epoch int64, key portable.Hash) string {
	return fmt.Sprintf("v1/requests/%d/%s/", epoch, key)
}

func blobName(d portable.Digest) string { return blobsName + d.Hex() }

// store is one remote.
type store struct {
	config remote.Config
	engine engine
	layout sync.Once // v1/oci-layout is written

	registry *registry // set for an OCI registry, where cards have no epochs
}

func newStore(c remote.Config) (*store, error) {
	u, err := url.Parse(c.URL)
	if err != nil {
		return nil, err
	}
	s := &store{config: c}
	switch u.Scheme {
	case "file":
		s.engine = &directory{dir: u.Path}
	case "https":
		s.engine = newHTTPS(c, u)
	case "oci":
		s.registry, err = newRegistry(c, u)
		s.engine = s.registry
	default:
		s.engine, err = newS3(c, u)
	}
	return s, err
}

func (s *store) epoch() int64 { return remote.Epoch(s.engine.clock()) }

func (s *store) do(ctx context.Context, c *call, a *remote.Answer) (err error) {
	r := c.request
	if can := s.engine.can(); !can.Write &&
		(r.Do == remote.DoPutBlobs || r.Do == remote.DoPutCard ||
			r.Do == remote.DoRenew || r.Do == remote.DoPutTrust || r.Do == remote.DoCollect) {
		return fail("unsupported", "%s is read only", r.Remote.URL)
	}
	switch r.Do {
	case remote.DoHello:
		can := s.engine.can()
		a.Can = &can
	case remote.DoLook:
		a.Cards, err = s.look(ctx, r.Key)
	case remote.DoFetch:
		err = s.fetch(ctx, c)
	case remote.DoPutBlobs:
		a.Sent, err = s.putBlobs(ctx, c)
	case remote.DoPutCard:
		a.Put, err = s.putCard(ctx, r)
	case remote.DoRenew:
		a.Put, err = s.renew(ctx, r)
	case remote.DoLease:
		a.Lease, err = s.lease(ctx, &r.Lease)
	case remote.DoTrust:
		var raw []byte
		raw, _, err = small(ctx, s.engine, trustName, remote.MaxTrust)
		a.Cards = [][]byte{raw}
	case remote.DoPutTrust:
		var put remote.Put
		put, err = s.replace(ctx, trustName, r.Card, r.Keys.Over, remote.MaxTrust)
		a.Put = string(put)
	case remote.DoCollect:
		if s.registry != nil {
			return collectsItself()
		}
		a.Kinds, err = s.collect(ctx, c)
	case remote.DoCheck:
		a.Check, err = s.check(ctx)
	default:
		err = fail("unsupported", "the request %.40q is not known", r.Do)
	}
	return err
}

// look reads both epochs at the same time. One result suffices, even if the other failed.
func (s *store) look(ctx context.Context, key remote.Key) ([][]byte, error) {
	ask := s.card
	if key.Request {
		ask = s.cards
	}
	if key.Request && !s.engine.can().List {
		return nil, fail("missing", "%s cannot be listed", s.config.URL)
	}
	now := s.epoch()
	var found [2][][]byte
	var errs [2]error
	var both sync.WaitGroup
	for i := range found {
		if i > 0 && s.registry != nil {
			continue
		}
		both.Go(func() { found[i], errs[i] = ask(ctx, now-int64(i), key.Hash) })
	}
	both.Wait()
	if !key.Request && len(found[0]) > 0 {
		return found[0], nil // the previous epoch may have the same build from another publisher
	}
	if all := distinct(append(found[0], found[1]...)); len(all) > 0 {
		return all, nil
	}
	if err := worst(errs[:]); err != nil {
		return nil, err
	}
	return nil, fail("missing", "it does not have the build")
}

// worst returns the most severe error.
func worst(errs []error) error {
	for _, class := range []error{remote.ErrUnreachable, remote.ErrDamaged, remote.ErrRefused} {
		for _, err := range errs {
			if isClass(err, class) {
				return err
			}
		}
	}
	return nil
}

// distinct drops cards that both epochs have, and those above the bounds of an answer.
func distinct(cards [][]byte) (out [][]byte) {
	seen, total := make(map[portable.Digest]bool), 0
	for _, card := range cards {
		d := portable.DigestOf(card)
		if seen[d] || len(out) == remote.MaxCards || total+len(card) > remote.MaxLook {
			continue
		}
		seen[d], total = true, total+len(card)
		out = append(out, card)
	}
	return out
}

// card reads the card of a build.
func (s *store) card(ctx context.Context, epoch int64, key portable.Hash) ([][]byte, error) {
	raw, err := s.readCard(ctx, buildName(epoch, key), key)
	if err != nil {
		return nil, err
	}
	return [][]byte{raw}, nil
}

func (s *store) readCard(ctx context.Context, name string, key portable.Hash) ([]byte, error) {
	raw, _, err := small(ctx, s.engine, name, remote.MaxCard)
	if err != nil {
		return nil, err
	}
	card, err := portable.ParseCard(name, raw)
	switch {
	case err != nil:
		return nil, fail("damaged", "%v", err)
	case card.Config.BuildKey != key:
		return nil, fail("damaged", "%s is of the build key %s", name, card.Config.BuildKey)
	}
	return raw, nil
}

// cards reads the cards of all builds that answer a request. A damaged one does not hide the rest.
func (s *store) cards(ctx context.Context, epoch int64, key portable.Hash) ([][]byte, error) {
	prefix := requestName(epoch, key)
	names, err := s.engine.list(ctx, prefix, remote.MaxCards)
	if err != nil {
		return nil, err
	}
	found, errs := make([][]byte, len(names)), make([]error, len(names))
	var all errgroup.Group
	all.SetLimit(8)
	for i, name := range names {
		all.Go(func() error {
			var build portable.Hash
			if build.UnmarshalText([]byte(name)) != nil {
				return nil
			}
			object := prefix + name
			if s.registry != nil {
				object = buildName(epoch, build)
			}
			found[i], errs[i] = s.readCard(ctx, object, build)
			return nil
		})
	}
	_ = all.Wait() // errors are in errs
	var out [][]byte
	for _, card := range found {
		if card != nil {
			out = append(out, card)
		}
	}
	if len(out) == 0 {
		return nil, worst(errs)
	}
	return out, nil
}

// putCard puts a card under its build key, then under its request keys. The result is that of the
// build key. If a publisher dies between the two, the next one completes the put.
func (s *store) putCard(ctx context.Context, r *remote.Request) (string, error) {
	card, err := portable.ParseCard("card", r.Card)
	switch {
	case err != nil:
		return "", fail("local", "%v", err)
	case card.Config.BuildKey != r.Keys.Build || len(r.Card) > remote.MaxCard:
		return "", fail("local", "the card is of the build key %s, or above %d bytes",
			card.Config.BuildKey, remote.MaxCard)
	}
	now := s.epoch()
	over := r.Keys.Over
	if s.registry != nil {
		over = portable.Digest{} // registries have no conditional puts
	}
	put, err := s.replaceCard(ctx, buildName(now, r.Keys.Build), r.Keys.Build, r.Card, over)
	if err != nil {
		return "", err
	}
	body := r.Card
	if put == remote.Exists { // use the card that readers see
		if body, err = s.readCard(ctx, buildName(now, r.Keys.Build), r.Keys.Build); err != nil {
			return string(put), nil
		}
	}
	for _, key := range r.Keys.Requests {
		name := requestName(now, key) + r.Keys.Build.String()
		if _, err := s.replaceCard(ctx, name, r.Keys.Build, body, over); err != nil {
			return "", err
		}
	}
	return string(put), nil
}

// replaceCard makes a card, or replaces a damaged one or the one with the digest over.
func (s *store) replaceCard(ctx context.Context, name string, key portable.Hash, body []byte,
	over portable.Digest) (remote.Put, error) {
	put, err := s.replace(ctx, name, body, over, remote.MaxCard)
	if put != remote.Exists && (err == nil || !isClass(err, remote.ErrDamaged)) {
		return put, err
	}
	if _, err := s.readCard(ctx, name, key); err == nil || !isClass(err, remote.ErrDamaged) {
		return remote.Exists, nil
	}
	o, err := s.engine.stat(ctx, name)
	if err != nil {
		return "", err
	}
	err = s.put(ctx, name, body, condition{match: o.etag})
	if errors.Is(err, errExists) {
		return remote.Exists, nil
	}
	return remote.Replaced, err
}

// replace makes an object, or replaces the one with the digest over.
func (s *store) replace(ctx context.Context, name string, body []byte, over portable.Digest,
	most int64) (remote.Put, error) {
	err := s.create(ctx, name, body)
	switch {
	case err == nil:
		return remote.Created, nil
	case !errors.Is(err, errExists):
		return "", err
	case over == portable.Digest{}:
		return remote.Exists, nil
	}
	raw, o, err := small(ctx, s.engine, name, most)
	if err != nil {
		return "", err
	}
	if portable.DigestOf(raw) != over {
		return remote.Exists, nil
	}
	err = s.put(ctx, name, body, condition{match: o.etag})
	if errors.Is(err, errExists) {
		return remote.Exists, nil
	}
	return remote.Replaced, err
}

// create makes an object unless there is one. A server may refuse before it has read the body,
// which arrives as a reset of the connection, and a proxy may repeat a request that succeeded:
// therefore after an error the object itself is read.
func (s *store) create(ctx context.Context, name string, body []byte) error {
	err := s.put(ctx, name, body, condition{create: true})
	if errors.Is(err, errExists) || !transient(ctx, err) {
		return err
	}
	raw, _, again := small(ctx, s.engine, name, max(int64(len(body)), remote.MaxCard))
	switch {
	case again == nil && bytes.Equal(raw, body):
		return nil
	case again == nil || isClass(again, remote.ErrDamaged):
		return errExists
	case isClass(again, remote.ErrMissing):
		return s.put(ctx, name, body, condition{create: true})
	}
	return err
}

func (s *store) put(ctx context.Context, name string, body []byte, when condition) error {
	sum := portable.DigestOf(body)
	return s.engine.put(ctx, name, io.NewSectionReader(bytes.NewReader(body), 0, int64(len(body))),
		sum.Hex(), when)
}

// renew puts a card into the current epoch, after its blobs are touched.
func (s *store) renew(ctx context.Context, r *remote.Request) (string, error) {
	card, err := portable.ParseCard("card", r.Card)
	if err != nil {
		return "", fail("local", "%v", err)
	}
	all, limited := errgroup.WithContext(ctx)
	all.SetLimit(8)
	for _, d := range append(card.Manifest.Layers, card.Manifest.Config) {
		all.Go(func() error {
			o, err := s.engine.stat(limited, blobName(d.Digest))
			switch {
			case err == nil && o.size >= 0 && o.size != d.Size:
				err = fail("missing", "blob %s has %d bytes, not %d", d.Digest, o.size, d.Size)
			case isClass(err, remote.ErrRefused): // see remote.ErrRefused
				err = fail("missing", "blob %s: %v", d.Digest, err)
			case err == nil && s.old(o):
				err = s.engine.touch(limited, blobName(d.Digest), o.size)
			}
			return err
		})
	}
	if err := all.Wait(); err != nil {
		return "", err
	}
	_, err = s.readCard(ctx, buildName(s.epoch(), r.Keys.Build), r.Keys.Build)
	if err == nil {
		return string(remote.Exists), nil
	}
	if isClass(err, remote.ErrUnreachable) {
		return "", err
	}
	return s.putCard(ctx, r)
}

func (s *store) old(o *object) bool {
	return !o.modified.IsZero() && s.engine.clock().Sub(o.modified) > touchAfter
}

// putBlobs uploads the blobs that are missing.
func (s *store) putBlobs(ctx context.Context, c *call) (*remote.Sent, error) {
	if len(c.files) != len(c.request.Blobs) {
		return nil, fail("local", "%d blobs with %d descriptors", len(c.request.Blobs),
			len(c.files))
	}
	s.layout.Do(func() {
		// Best effort: only other tools read it, and a bucket that refuses it refuses the blobs
		// too.
		_ = s.create(ctx, layoutName, []byte(layoutText))
	})
	t := newTally(c)
	for _, b := range c.request.Blobs {
		t.total += b.Size
	}
	var sent remote.Sent
	all, limited := errgroup.WithContext(ctx)
	all.SetLimit(8)
	for i, b := range c.request.Blobs {
		if s.registry != nil && isManifest(c.files[i], b.Size) {
			continue // a manifest, which is put with the card
		}
		all.Go(func() error {
			name := blobName(b.Digest)
			o, err := s.engine.stat(limited, name)
			there := err == nil && o.size == b.Size && !b.Again
			if err != nil && !isClass(err, remote.ErrMissing) && !isClass(err, remote.ErrRefused) {
				return err
			}
			if there && s.old(o) {
				err = s.engine.touch(limited, name, b.Size)
			} else if !there {
				err = s.upload(limited, c, i, t)
			}
			if err == nil {
				t.sent(&sent, b.Size, there)
			}
			return err
		})
	}
	err := all.Wait()
	return &sent, err
}

func (s *store) upload(ctx context.Context, c *call, i int, t *tally) error {
	b := c.request.Blobs[i]
	hashed := &paced{ctx: ctx, at: c.files[i], moved: func(int64) { t.moved(0) }}
	if sum, err := sumOf(hashed, b.Size); err != nil || sum != b.Digest {
		return fail("local", "blob %s: its file has the SHA-256 %s: %v", b.Digest, sum, err)
	}
	paced := &paced{ctx: ctx, at: c.files[i], limit: t.limit, moved: t.moved}
	put := func() error {
		return s.engine.put(ctx, blobName(b.Digest), io.NewSectionReader(paced, 0, b.Size),
			b.Digest.Hex(), condition{})
	}
	err := put()
	if transient(ctx, err) {
		err = put()
	}
	return err
}

// leaseObject is the content of a lease's object.
type leaseObject struct {
	Holder   string `json:"holder"`
	Taken    int64  `json:"taken"` // Unix milliseconds of the server
	Estimate int64  `json:"estimate_ms"`
	TTL      int64  `json:"ttl_ms"` // 0: released
}

const maxLease = 4 << 10

func (s *store) lease(ctx context.Context, l *remote.LeaseRequest) (*remote.Lease, error) {
	notOffered := &remote.Lease{State: remote.NotOffered}
	can := s.engine.can()
	can.CreateOnly = can.CreateOnly && !l.Look
	if l.Holder == "" || len(l.Holder) > 200 || l.TTL <= 0 || l.Estimate < 0 {
		return nil, fail("local", "a lease needs a holder, a TTL and an estimate")
	}
	name := "v1/leases/" + l.Key.String()
	mine := leaseObject{l.Holder, s.engine.clock().UnixMilli(), l.Estimate.Milliseconds(),
		l.TTL.Milliseconds()}
	for range 3 {
		if can.CreateOnly && !l.Release {
			err := s.put(ctx, name, encode(mine), condition{create: true})
			if err == nil {
				return &remote.Lease{State: remote.Granted}, nil
			}
			if isClass(err, remote.ErrUnsupported) || isClass(err, remote.ErrRefused) {
				can.CreateOnly = false // not create-only, so read which one was stored
			} else if !errors.Is(err, errExists) && !transient(ctx, err) {
				return nil, err
			}
		}
		raw, o, err := small(ctx, s.engine, name, maxLease)
		switch {
		case isClass(err, remote.ErrMissing) && (l.Release || !can.CreateOnly):
			return notOffered, nil
		case isClass(err, remote.ErrMissing):
			continue // removed between the two calls
		case err != nil:
			return nil, err
		}
		var have leaseObject
		if json.Unmarshal(raw, &have) != nil || have.TTL < 0 || have.Estimate < 0 {
			// unreadable, so it expires as others do
			have = leaseObject{Taken: o.modified.UnixMilli(), TTL: mine.TTL}
		}
		out, err := s.held(ctx, name, l, &have, o)
		if can.CreateOnly && out == nil && err == nil {
			continue // another machine changed it
		}
		if out == nil && err == nil {
			out = notOffered
		}
		return out, err
	}
	return &remote.Lease{State: remote.Held}, nil
}

// held answers for a lease that exists: nil if it has to be read again.
func (s *store) held(ctx context.Context, name string, l *remote.LeaseRequest, have *leaseObject,
	o *object) (*remote.Lease, error) {
	now := s.engine.clock()
	own := have.Holder == l.Holder
	over := have.TTL == 0 || now.Sub(o.modified) > 2*time.Duration(have.TTL)*time.Millisecond
	if !own && (!over || l.Release) {
		age := max(now.Sub(o.modified), now.Sub(time.UnixMilli(have.Taken)), 0)
		return &remote.Lease{State: remote.Held, Age: min(age, 24*time.Hour),
			Estimate: time.Duration(min(have.Estimate, 1<<40)) * time.Millisecond}, nil
	}
	if !s.engine.can().CreateOnly || l.Look {
		return nil, nil
	}
	next := leaseObject{l.Holder, have.Taken, l.Estimate.Milliseconds(), l.TTL.Milliseconds()}
	if !own {
		next.Taken = now.UnixMilli()
	}
	if l.Release {
		next.TTL = 0
	}
	err := s.put(ctx, name, encode(next), condition{match: o.etag})
	switch {
	case errors.Is(err, errExists), isClass(err, remote.ErrMissing):
		return nil, nil
	case err != nil:
		return nil, err
	}
	return &remote.Lease{State: remote.Granted, TakenOver: !own && have.TTL != 0}, nil
}

func encode(v any) []byte {
	raw, err := json.Marshal(v)
	if err != nil {
		// cannot happen: strings and numbers can always be encoded
		panic("epcached-remote: " + err.Error())
	}
	return raw
}

// findings are the results of a check.
type findings []remote.Finding

func (f *findings) add(name string, bad error, good, follows string) {
	one := remote.Finding{Name: name, OK: bad == nil, Text: good}
	if bad != nil {
		one.Text = strings.TrimSpace(classify(bad).Text) + ": " + follows
	}
	*f = append(*f, one)
}

// check tries the operations that the daemon needs. It fails only if the remote does not answer at
// all.
func (s *store) check(ctx context.Context) (found findings, err error) {
	if s.registry != nil {
		if found, err = s.registry.check(ctx); err == nil {
			found.addColdLook(ctx, s.config)
		}
		return found, err
	}
	add := found.add
	_, _, err = small(ctx, s.engine, layoutName, 1<<10)
	if isClass(err, remote.ErrUnreachable) {
		add("read", err, "", "every look-up is a miss")
		return found, err
	}
	if isClass(err, remote.ErrMissing) {
		err = nil // no build was published yet
	}
	add("read", err, "objects can be read", "every look-up is a miss; on S3, without the right to "+
		"list (s3:ListBucket), so are objects that are missing")
	found.addColdLook(ctx, s.config)
	can := s.engine.can()
	if v, is := s.engine.(interface {
		versioned(ctx context.Context) (bool, error)
	}); is {
		if kept, err := v.versioned(ctx); err == nil && kept {
			add("versions", nil, "the bucket keeps replaced and removed objects: its lifecycle "+
				"rules must expire noncurrent versions (doc/s3/lifecycle.json)", "")
		}
	}
	if can.List {
		_, err = s.engine.list(ctx, checkName, 1)
		add("list", err, "prefixes can be listed", "builds are found by their build key alone")
	}
	if !can.Write {
		return found, nil
	}
	name, text := checkName+rand.Text(), []byte("epcached remote check")
	err = s.put(ctx, name, text, condition{create: true})
	add("write", err, "objects can be created", "nothing can be published")
	if err != nil {
		return found, nil
	}
	want := func(err error) error {
		switch {
		case err == nil:
			return errors.New("an existing object was replaced")
		case errors.Is(err, errExists):
			return nil
		}
		return err
	}
	add("create-only", want(s.put(ctx, name, text, condition{create: true})),
		"an existing object is not replaced",
		"the last writer of a card wins, and leases do not hold")
	o, err := s.engine.stat(ctx, name)
	if err == nil {
		err = want(s.put(ctx, name, text, condition{match: "00000000000000000000000000000000"}))
	}
	if err == nil {
		err = s.put(ctx, name, text, condition{match: o.etag})
	}
	add("if-match", err, "an object is replaced only if it is the one that was read",
		"a lease of a machine that crashed cannot be taken over, so that all compile")
	add("range", checkRange(ctx, s.engine, name, text), "parts of objects can be read",
		"builds are transferred whole")
	if o != nil {
		add("clock", clockError(time.Since(o.modified)), "the clocks agree",
			"expiry dates of signatures are judged by it")
	}
	return found, nil
}

// addColdLook measures a look-up by a new connection, as the first request after a rest makes it. A
// request gives it a quarter of the compile that it expects, but at least 0.3 s.
func (f *findings) addColdLook(ctx context.Context, c remote.Config) {
	allowed := cmp.Or(c.Connect, remote.DefaultConnect)
	c.Connect = time.Minute
	cold, err := newStore(c)
	began := time.Now()
	if err == nil {
		_, err = cold.look(ctx, remote.BuildKey(portable.Hash{}))
	}
	if isClass(err, remote.ErrMissing) {
		err = nil
	}
	took := time.Since(began).Round(time.Millisecond)
	if err == nil && took > allowed {
		err = fmt.Errorf("it takes %v, and requests wait for %v at most", took, allowed)
	}
	good := fmt.Sprintf("a first one takes %v", took)
	if took > 300*time.Millisecond {
		good += fmt.Sprintf(", so builds are fetched if their compiles take %v or more", 4*took)
	}
	f.add("look-up", err, good, "first look-ups are misses")
}

func clockError(skew time.Duration) error {
	if skew.Abs() > 5*time.Minute {
		return fmt.Errorf("the clock of this machine is %v off the server's",
			skew.Round(time.Second))
	}
	return nil
}

func checkRange(ctx context.Context, e engine, name string, text []byte) error {
	o, err := e.get(ctx, name, 3, 5)
	if err != nil {
		return err
	}
	defer o.body.Close()
	got, err := io.ReadAll(io.LimitReader(o.body, int64(len(text))))
	if err == nil && !bytes.Equal(got, text[3:8]) {
		err = fmt.Errorf("%d bytes from offset %d, not 5 from 3", len(got), o.from)
	}
	return err
}

// join returns the key of an object below the prefix of a remote's URL.
func join(prefix, name string) string {
	out := path.Join(strings.Trim(prefix, "/"), name)
	if strings.HasSuffix(name, "/") {
		out += "/"
	}
	return out
}
