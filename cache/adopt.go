package cache

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
)

// ownArtefact is a request for a model that is compiled already.
type ownArtefact struct {
	*Request
	id    modelIdentity
	rt    *runtime
	rc    *runtimeContent
	t     *telling
	phase func(string)
}

func (r *Request) adopts() bool { return r.Adopt && r.tooLarge == "" }

// boundAdoption notes that a request brings more than may be put. Its files are not read then,
// because hashing them would keep the application from loading a model that is passed through.
func (c *Cache) boundAdoption(r *Request) error {
	if !r.Adopt || len(r.Group) > 0 {
		return nil
	}
	var total int64
	for _, f := range r.files() {
		info, err := f.Stat()
		if err != nil {
			return apierr.New(apierr.BadModel, err, "model %q cannot be read", r.Name)
		}
		total += info.Size()
	}
	if most := c.settings.Load().claims.Bytes; total > most {
		r.tooLarge = fmt.Sprintf("its files have %s, and a build that is put may have %s",
			bytesize.Text(total), bytesize.Text(most))
	}
	return nil
}

// adopt answers for a compiled model that its user wants kept: with the build that there is of it,
// or with one that is made of the user's own files. These are taken in as a put's are, so a
// stranger's bytes are never served unchecked. Without an answer the model is passed through, and
// why says what kept it from being adopted. why is empty where the request adopts nothing.
func (c *Cache) adopt(ctx context.Context, o ownArtefact) (a *Answer, why string, err error) {
	m, err := readModel(ctx, o.Request)
	if err != nil {
		return nil, "", err
	}
	names, err := m.ArtefactFiles()
	if err != nil {
		return nil, err.Error(), nil
	}
	own := *o.Request
	own.adopting, own.Embed = true, embedded(m)
	own.External = make(map[string]*os.File, len(names))
	for _, name := range names {
		own.External[name] = o.External[name] // and nothing else that its user sent
	}
	o.Request = &own
	p, err := c.plan(ctx, o.Request, o.id.Digest, o.rc, o.phase)
	if err != nil {
		return nil, "", err
	}
	switch o.OnMiss {
	case KeyOnly:
		return &Answer{Outcome: Key, RequestKey: p.requestKey, ModelDigest: o.id.Digest,
			Record: p.recordJSON, Runtime: o.rt.name}, "", nil
	case Explain:
		a, err := c.explain(ctx, o.Request, o.id, p, o.rt, o.rc)
		if err == nil && a.Explanation.Decision == decidedMiss {
			return nil, "", nil
		}
		return a, "", err
	}
	if o.OnMiss != Refresh && o.OnMiss != Bypass {
		found, err := c.lookUp(ctx, o.Request, p, o.rt, o.rc, o.phase)
		if found.answer != nil || err != nil {
			return c.finish(found.answer, o.Request, o.id, p, o.rt), "", err
		}
		if found.stale {
			return nil, found.why, nil
		}
		c.index.Counters.Add("misses", 1)
	}
	if o.OnMiss == Fail || o.OnMiss == Bypass {
		return nil, "", nil
	}
	return c.adoptNow(ctx, o, p)
}

// adoptNow makes the build, in one job for all requests at the same time, and looks it up as the
// next request will.
func (c *Cache) adoptNow(ctx context.Context, o ownArtefact, p *plan) (*Answer, string, error) {
	key, err := c.claimKey(o.Request, o.id, p)
	if err != nil {
		return nil, "nothing is to be kept of it", nil
	}
	begin := func() (runner, error) { return c.newAdoption(o, p, key) }
	result, _, err := c.flights.join(ctx, key, c.asking(o.Request, o.t), begin)
	switch {
	case ctx.Err() != nil:
		return nil, "", contextError(ctx, o.Request)
	case err != nil:
		return nil, err.Error(), nil
	}
	defer c.attend.taken(result.build.ID)
	found, err := c.lookUp(ctx, o.Request, p, o.rt, o.rc, o.phase)
	if err != nil {
		return nil, "", err
	}
	if found.answer == nil {
		return nil, "it is kept, and not served here: " + found.why, nil
	}
	a := c.finish(found.answer, o.Request, o.id, p, o.rt)
	a.Outcome, a.Why = Adopted, "your compiled model is kept now"
	return a, "", nil
}

func readModel(ctx context.Context, r *Request) (*epmodel.Model, error) {
	src, err := epmodel.FileSource(r.Graph)
	if err != nil {
		return nil, apierr.New(apierr.BadModel, err, "model %q cannot be read", r.Name)
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

// adoption is the job that makes a build of a user's compiled model: a claim with its put.
type adoption struct {
	claim *claim
	put   *Put
	files *Request // has the job's own descriptors
	about jobFacts
}

func (c *Cache) newAdoption(o ownArtefact, p *plan, key flightKey) (*adoption, error) {
	files, err := o.own()
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "model %q", o.Name)
	}
	if files.Runtime, err = o.Runtime.keepLibraries(false); err != nil {
		files.close()
		return nil, apierr.New(apierr.Internal, err, "model %q", o.Name)
	}
	out := c.newOutsider(key, &claimer{request: files, plan: p})
	out.first.claim, out.first.keeps, out.first.Why = false, true, "adopted: its user compiled it"
	put := &Put{Files: []PutFile{{Name: p.output(), File: files.Graph}}}
	for _, name := range sortedKeys(files.External) {
		put.Files = append(put.Files, PutFile{Name: name, File: files.External[name]})
	}
	return &adoption{files: files, about: out.first, put: put, claim: &claim{
		Claim: Claim{Output: p.output()}, adopts: true, state: claimPutting, outsider: out,
		request: files, plan: p, rc: o.rc, id: o.id, owner: c.reports.owners.of(o.Peer.UID),
		began: time.Now(), lasts: context.Background(),
	}}, nil
}

func (a *adoption) facts() jobFacts { return a.about }

func (a *adoption) run(ctx context.Context, f *flight) (*compiled, error) {
	defer a.files.close()
	takes, err := readSignature(ctx, a.files)
	if err != nil {
		return nil, err
	}
	a.claim.flight, a.claim.takes = f, takes
	return a.claim.outsider.c.take(ctx, a.claim, a.put, f.tell)
}

// adopted tells whether a build was made of a user's compiled model, so that nothing is known of
// the libraries that made it.
func adopted(b *index.Build) bool {
	return b.Put && len(b.EPs) > 0 && b.EPs[0].LibraryDigest.IsZero()
}

// unknownMaker leaves of the facts what the graph of an adopted model states itself.
func unknownMaker(f *index.EPFacts) {
	*f = index.EPFacts{Name: f.Name, Devices: f.Devices, SDKVersion: f.SDKVersion,
		HardwareArchitecture: f.HardwareArchitecture, CompatibilityString: f.CompatibilityString,
		TookNone: f.TookNone}
}
