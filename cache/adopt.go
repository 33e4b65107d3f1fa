package cache

import (
	"context"
	"os"
	"time"

	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/refusal"
)

// adopt answers for a compiled model that its user wants kept: with the build that there is of it, or with one that is made of
// the user's own files. These are taken as a put's are, so a stranger's bytes are never served unchecked. Without an answer the
// model is passed through, and why says what kept it from being adopted; "" where only a build was asked for that is not there.
func (c *Cache) adopt(ctx context.Context, r *Request, id identity, rt *runtime, rc *runtimeContent, t *telling,
	phase func(string)) (a *Answer, why string, err error) {
	m, err := readModel(ctx, r)
	if err != nil {
		return nil, "", err
	}
	names, err := m.ArtefactFiles()
	if err != nil {
		return nil, err.Error(), nil
	}
	own := *r
	own.adopting, own.Embed = true, embedded(m)
	own.External = make(map[string]*os.File, len(names))
	for _, name := range names {
		own.External[name] = r.External[name] // and nothing else that its user sent
	}
	r = &own
	p, err := c.plan(ctx, r, id.Digest, rc, phase)
	if err != nil {
		return nil, "", err
	}
	switch r.OnMiss {
	case KeyOnly:
		return &Answer{Outcome: Key, RequestKey: p.requestKey, ModelDigest: id.Digest, Record: p.recordJSON, Runtime: rt.name}, "", nil
	case Explain:
		a, err := c.explain(ctx, r, id, p, rt, rc)
		if err == nil && a.Explanation.Decision == decidedMiss {
			return nil, "", nil
		}
		return a, "", err
	}
	if r.OnMiss != Refresh && r.OnMiss != Bypass {
		found, err := c.lookUp(ctx, r, p, rt, rc, phase)
		if found.answer != nil || err != nil {
			return c.finish(found.answer, r, id, p, rt), "", err
		}
		if found.stale {
			return nil, found.why, nil
		}
		c.index.Count("misses", 1)
	}
	if r.OnMiss == Fail || r.OnMiss == Bypass {
		return nil, "", nil
	}
	return c.adoptNow(ctx, r, id, p, rt, rc, t, phase)
}

// adoptNow makes the build, once for all who want it at the same time, and looks it up as the next request will.
func (c *Cache) adoptNow(ctx context.Context, r *Request, id identity, p *plan, rt *runtime, rc *runtimeContent, t *telling,
	phase func(string)) (*Answer, string, error) {
	key, err := c.claimKey(r, id, p)
	if err != nil {
		return nil, "nothing is to be kept of it", nil
	}
	result, _, err := c.flights.join(ctx, key, c.asking(r, t), func() (runner, error) { return c.newAdoption(r, id, p, rc, key) })
	switch {
	case ctx.Err() != nil:
		return nil, "", contextError(ctx, r)
	case err != nil:
		return nil, err.Error(), nil
	}
	defer c.attend.taken(result.build.ID)
	found, err := c.lookUp(ctx, r, p, rt, rc, phase)
	if err != nil {
		return nil, "", err
	}
	if found.answer == nil {
		return nil, "it is kept, and not served here: " + found.why, nil
	}
	a := c.finish(found.answer, r, id, p, rt)
	a.Outcome, a.Why = Adopted, "your compiled model is kept now"
	return a, "", nil
}

// readModel reads the request's graph.
func readModel(ctx context.Context, r *Request) (*epmodel.Model, error) {
	src, err := epmodel.FileSource(r.Graph)
	if err != nil {
		return nil, refusal.New(refusal.BadModel, err, "model %q cannot be read", r.Name)
	}
	m, err := epmodel.Read(ctx, r.Name, src)
	if err != nil {
		return nil, modelError(r, err)
	}
	return m, nil
}

// embedded tells which form an artefact has.
func embedded(m *epmodel.Model) bool {
	for i := range m.Contexts {
		if n := &m.Contexts[i]; n.MainContext == 1 {
			return n.EmbedMode == 1
		}
	}
	return false
}

// adoption is the job that makes a build of a user's compiled model. It is a claim whose holder has put already.
type adoption struct {
	claim *claim
	put   *Put
	files *Request // whose descriptors the job has
	about jobFacts
}

func (c *Cache) newAdoption(r *Request, id identity, p *plan, rc *runtimeContent, key flightKey) (*adoption, error) {
	files, err := r.own()
	if err != nil {
		return nil, refusal.New(refusal.Internal, err, "model %q", r.Name)
	}
	if files.Runtime, err = r.Runtime.keepLibraries(false); err != nil { // which it is not for
		files.close()
		return nil, refusal.New(refusal.Internal, err, "model %q", r.Name)
	}
	o := c.newOutsider(key, &claimer{request: files, plan: p})
	o.first.claim, o.first.keeps, o.first.Why = false, true, "adopted: its user compiled it"
	a := &adoption{files: files, about: o.first, put: &Put{Files: []PutFile{{Name: outputName(p), File: files.Graph}}}}
	for _, name := range sortedKeys(files.External) {
		a.put.Files = append(a.put.Files, PutFile{Name: name, File: files.External[name]})
	}
	a.claim = &claim{Claim: Claim{Output: outputName(p)}, outsider: o, request: files, plan: p, rc: rc, id: id, adopts: true,
		owner: c.reports.owners.of(r.Peer.UID), began: time.Now(), state: claimPutting, done: make(chan struct{})}
	return a, nil
}

func (a *adoption) facts() jobFacts { return a.about }

func (a *adoption) run(ctx context.Context, f *flight) (*compiled, error) {
	defer a.files.close()
	takes, err := readSignature(ctx, a.files)
	if err != nil {
		return nil, err
	}
	a.claim.flight, a.claim.takes = f, takes
	result, _, err := a.claim.outsider.c.take(ctx, a.claim, a.put, f.tell)
	return result, err
}

// adopted tells whether a build was made of a user's compiled model, so that nothing is known of the libraries that made it.
func adopted(b *index.Build) bool { return b.Put && len(b.EPs) > 0 && b.EPs[0].LibraryDigest.IsZero() }

// unknownMaker leaves of the facts what the graph of an adopted model states itself.
func unknownMaker(f *index.EPFacts) {
	*f = index.EPFacts{Name: f.Name, SDKVersion: f.SDKVersion, HardwareArchitecture: f.HardwareArchitecture,
		CompatibilityString: f.CompatibilityString, Devices: f.Devices}
}
