package build

import (
	"context"
	"errors"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/internal/apierr"
)

// CompileLater has the model compiled, and answers at once with the job.
func (bd *Builder) CompileLater(ctx context.Context, at *request.Attempt, why string) (*request.Answer, error) {
	key := at.JobKey()
	if key.Scope == "" {
		return nil, apierr.New(apierr.BadRequest, nil, "model %q: nothing is to be kept of it, so there is nothing to compile in the background", at.Name).
			WithHint("ask with on_miss wait")
	}
	f, first, err := bd.Jobs.Send(key, at.Untold().Caller(bd.Owner), bd.begin(at, key.Scope))
	if err != nil {
		return nil, request.JobError(ctx, at.Name, err)
	}
	if !first {
		why = "it is being compiled already"
		if err := bd.inherit(f, key, at); err != nil {
			return nil, apierr.New(apierr.Internal, err, "model %q", at.Name)
		}
	}
	bd.Queued(f, at)
	a := at.Answer(request.Later)
	a.Job, a.Why = f.ID, why
	return a, nil
}

// inherit has the job done here if what is under way may not do: an application's, which may bring
// nothing, and for a request that is strict about ONNX Runtime another's. For each user that goes
// on without it a request is kept until then.
func (bd *Builder) inherit(f *jobs.Job, key jobs.Key, at *request.Attempt) error {
	if !f.About().Claim && !at.StrictORT || !f.Inherit(jobs.Heir{UID: at.Peer.UID, Strict: at.StrictORT}, len(at.Descriptors())) {
		return nil
	}
	files, err := at.Own()
	if err != nil {
		return err
	}
	own := at.WithRequest(files).Untold()
	bd.Later(func(ctx context.Context) {
		defer files.Close()
		select {
		case <-f.Done():
		case <-ctx.Done():
			return
		}
		result, err := f.End()
		if !errors.As(err, new(*request.ClaimEnd)) && (err != nil || !own.OtherORT(result.Build.ORTVersion)) {
			return
		}
		next, _, err := bd.Jobs.Send(key, own.Caller(bd.Owner), bd.begin(own, key.Scope))
		switch {
		case err == nil:
			bd.Queued(next, own)
		case ctx.Err() == nil: // else the daemon ends, and nothing failed
			bd.Log.Info("not compiled after a claim that ended without a result", "model", own.Name, "error", err)
			bd.Store.Happened(event.For(event.About{Peer: own.Peer, Key: f.About().RequestKey, Model: own.Name},
				event.Failed, "%v", err))
		}
	})
	return nil
}
