package cache

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
)

// tooLargeToAdopt says that a request brings more than may be put, "" if it does not. Its files are not read then,
// because hashing them would keep the application from loading a model that is passed through.
func (c *Cache) tooLargeToAdopt(r *request.Request) (why string, err error) {
	if !r.Adopt || len(r.Group) > 0 {
		return "", nil
	}
	var total int64
	for _, f := range r.AllFiles() {
		info, err := f.Stat()
		if err != nil {
			return "", apierr.New(apierr.BadModel, err, "model %q cannot be read", r.Name)
		}
		total += info.Size()
	}
	if most := c.settings.Load().claims.Bytes; total > most {
		why = fmt.Sprintf("its files have %s, and a build that is put may have %s",
			bytesize.Text(total), bytesize.Text(most))
	}
	return why, nil
}

// adopt answers for a compiled model that its user wants kept: with the build that there is of it,
// or with one that is made of the user's own files. These are taken in as a put's are, so a
// stranger's bytes are never served unchecked. Without an answer the model is passed through, and
// why says what kept it from being adopted. why is empty where the request adopts nothing.
func (c *Cache) adopt(ctx context.Context, at *request.Attempt) (a *request.Answer, why string, err error) {
	m, err := at.Request.ModelFiles(0).Read(ctx)
	if err != nil {
		return nil, "", err
	}
	names, err := m.ArtefactFiles()
	if err != nil {
		return nil, err.Error(), nil
	}
	own := *at.Request
	own.Embed, own.External = embedded(m), make(map[string]*os.File, len(names))
	for _, name := range names {
		own.External[name] = at.External[name] // and nothing else that its user sent
	}
	if at, err = c.planner.Planned(ctx, at.AsAdoption(&own)); err != nil {
		return nil, "", err
	}
	switch at.OnMiss {
	case request.KeyOnly:
		return at.Answer(request.Key), "", nil
	case request.Explain:
		a, err := c.explain(ctx, at)
		if err == nil && a.Explanation.Decision == query.Miss {
			return nil, "", nil
		}
		return a, "", err
	}
	if at.OnMiss != request.Refresh && at.OnMiss != request.Bypass {
		found, err := c.lookup.Find(ctx, at)
		if found.Answer != nil || err != nil {
			return c.lookup.Finish(found.Answer, at), "", err
		}
		if found.Stale {
			return nil, found.Why, nil
		}
		c.index.Counters.Add("misses", 1)
	}
	if at.OnMiss == request.Fail || at.OnMiss == request.Bypass {
		return nil, "", nil
	}
	done, why, err := c.claims.Adopt(ctx, at)
	if done == nil {
		return nil, why, err
	}
	defer done()
	found, err := c.lookup.Find(ctx, at) // as the next request will
	if err != nil {
		return nil, "", err
	}
	if found.Answer == nil {
		return nil, "it is kept, and not served here: " + found.Why, nil
	}
	a = c.lookup.Finish(found.Answer, at)
	a.Outcome, a.Why = request.Adopted, "your compiled model is kept now"
	return a, "", nil
}

// Adopt makes a build of the request's own compiled model, in one job for all requests at the same
// time. The caller calls done when it has the build. Where done is nil there is none, and err or why
// says why not.
func (cs *claims) Adopt(ctx context.Context, at *request.Attempt) (done func(), why string, err error) {
	key, err := cs.key(at)
	if err != nil {
		return nil, "nothing is to be kept of it", nil
	}
	begin := func() (jobs.Work, error) { return cs.newAdoption(at, key) }
	result, _, err := cs.Jobs.Join(ctx, key, at.Caller(cs.Owner), begin)
	switch {
	case ctx.Err() != nil:
		return nil, "", request.ContextError(ctx, at.Name)
	case err != nil:
		return nil, err.Error(), nil
	}
	return func() { cs.Store.Taken(result.Build.ID) }, "", nil
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

// newAdoption is the work that makes a build of a user's compiled model: a claim with its put.
func (cs *claims) newAdoption(at *request.Attempt, key jobs.Key) (jobs.Work, error) {
	files, err := at.Own()
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "model %q", at.Name)
	}
	if files.Runtime, err = keepLibraries(&at.Runtime, false); err != nil {
		files.Close()
		return nil, apierr.New(apierr.Internal, err, "model %q", at.Name)
	}
	at = at.WithRequest(files)
	about := at.JobAbout(key.Scope, "adopted: its user compiled it")
	about.Keeps = true
	put := &Put{Files: []PutFile{{Name: at.Plan.OutputName(), File: files.Graph}}}
	for _, name := range slices.Sorted(maps.Keys(files.External)) {
		put.Files = append(put.Files, PutFile{Name: name, File: files.External[name]})
	}
	cl := &claim{Claim: request.Claim{Output: at.Plan.OutputName()}, adopts: true, state: claimPutting, of: cs, scope: key.Scope,
		Attempt: at, owner: cs.Owner(at.Peer.UID), began: time.Now(), lasts: context.Background()}
	return jobs.Func{Is: about, Do: func(ctx context.Context, j *jobs.Job) (_ *jobs.Result, err error) {
		defer files.Close()
		if cl.takes, err = readSignature(ctx, files); err != nil {
			return nil, err
		}
		cl.job = j
		return cs.take(ctx, cl, put, j.Tell)
	}}, nil
}

// unknownMaker leaves of the facts what the graph of an adopted model states itself.
func unknownMaker(f *index.EPFacts) {
	*f = index.EPFacts{Name: f.Name, Devices: f.Devices, SDKVersion: f.SDKVersion,
		HardwareArchitecture: f.HardwareArchitecture, CompatibilityString: f.CompatibilityString,
		TookNone: f.TookNone}
}
