package claims

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// Adopt makes a build of the request's own compiled model, in one job for all requests at the same
// time. The caller calls done when it has the build. Where done is nil there is none, and err or
// why says why not.
func (cs *Claims) Adopt(ctx context.Context, at *request.Attempt) (
	done func(), why string, err error) {
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

// newAdoption is the work that makes a build of a user's compiled model: a claim with its put.
func (cs *Claims) newAdoption(at *request.Attempt, key jobs.Key) (jobs.Work, error) {
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
	cl := &claim{Claim: request.Claim{Output: at.Plan.OutputName()},
		adopts: true, state: claimPutting, of: cs, scope: key.Scope,
		Attempt: at, owner: cs.Owner(at.Peer.UID), began: time.Now(), lasts: context.Background()}
	do := func(ctx context.Context, j *jobs.Job) (_ *jobs.Result, err error) {
		defer files.Close()
		if cl.takes, err = readSignature(ctx, files); err != nil {
			return nil, err
		}
		cl.job = j
		return cs.take(ctx, cl, put, j.Tell)
	}
	return jobs.Func{Is: about, Do: do}, nil
}

// unknownMaker leaves of the facts what the graph of an adopted model states itself.
func unknownMaker(f *index.EPFacts) {
	*f = index.EPFacts{Name: f.Name, Devices: f.Devices, SDKVersion: f.SDKVersion,
		HardwareArchitecture: f.HardwareArchitecture, CompatibilityString: f.CompatibilityString,
		TookNone: f.TookNone}
}
