package workspace

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
)

// ErrNoSource says that a build cannot be compiled again before a request brings the model.
var ErrNoSource = errors.New("the source model is not kept")

// noSourceError is an ErrNoSource with the reason.
type noSourceError struct{ text string }

func (e *noSourceError) Error() string        { return e.text }
func (e *noSourceError) Is(target error) bool { return target == ErrNoSource }

// NoSource returns an ErrNoSource with the reason.
func NoSource(format string, args ...any) error {
	return &noSourceError{fmt.Sprintf(format, args...)}
}

// Sources opens source models that are recorded in builds. It is safe for concurrent use.
type Sources struct {
	Models     *identity.Models
	References *identity.Sources
	Store      *store.Store
	UID        uint32 // of the daemon
}

// Request returns the request that the build answers, with the model's files open, which the caller
// closes. The error wraps ErrNoSource if there is no model, or if it has changed since the build
// was made.
func (s *Sources) Request(ctx context.Context, b *index.Build) (*request.Request, error) {
	at, err := AttemptOf(b)
	if err != nil {
		return nil, err
	}
	names := []string{b.ModelName}
	for i := 1; i < len(b.Members); i++ {
		names = append(names, b.Members[i].ModelName)
	}
	return s.Reopen(ctx, at, names, SourcesOf(b))
}

// Reopen returns the attempt's request with its models open, which have these names and sources.
func (s *Sources) Reopen(ctx context.Context, at *request.Attempt, names []string,
	list []index.Source) (*request.Request, error) {
	var open []identity.Files
	for i := range list {
		f, err := s.open(ctx, &list[i], at.Peer.UID == s.UID)
		if err != nil {
			identity.CloseAll(open...)
			return nil, err
		}
		f.Name = names[i]
		open = append(open, f)
	}
	r := at.Request.WithModels(open)
	return r, s.CheckSame(ctx, r, at.Identity)
}

// RequestWith returns the build's request with the files of another equal request, if the build was
// made from the same bytes. The caller still closes the other request's files.
func (s *Sources) RequestWith(ctx context.Context, asked *request.Request, b *index.Build) (
	*request.Request, error) {
	at, err := AttemptOf(b)
	if err != nil {
		return nil, err
	}
	r := at.Request
	files, err := asked.WithOwnFiles()
	if err != nil {
		return nil, err
	}
	r.Graph, r.External, r.Group = files.Graph, files.External, files.Group
	return r, s.CheckSame(ctx, r, at.Identity)
}

// CheckSame compares the request's models with those of the build, and closes them if they differ.
func (s *Sources) CheckSame(ctx context.Context, r *request.Request, made identity.Model) error {
	id, err := s.Models.Identify(ctx,
		&identity.IdentifyRequest{UID: r.Peer.UID, Models: r.AllModels(), Phase: func(string) {}})
	if err == nil && id.Digest == made.Digest && slices.Equal(id.Group, made.Group) {
		return nil
	}
	where := r.Graph.Name()
	r.Close()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return NoSource("the source model at %q has changed: %v", where, err)
	}
	return NoSource("the source model at %q has changed", where)
}

// open opens one of the models that a build was made from. own says that the build is the daemon's
// own user's.
func (s *Sources) open(ctx context.Context, from *index.Source, own bool) (identity.Files, error) {
	switch from.Kind {
	case index.SourceReference:
		f, err := s.References.Open(ctx, from, own)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			err = NoSource("the source model is missing: %v", err)
		case err != nil:
			err = NoSource("the source model cannot be opened: %v", err)
		}
		return f, err
	case index.SourceCopy:
		out := identity.Files{External: make(map[string]*os.File)}
		for i, f := range from.Files {
			open, err := s.Store.Packing().Open(ctx, f.Digest)
			if packing.IsMissingOrDamaged(err) {
				s.Store.QuarantineAll(s.Store.Packing().DamageOf(ctx, f.Digest))
			}
			if err != nil {
				identity.CloseAll(out)
				return out, NoSource("the copy of the source model: %v", err)
			}
			if i == 0 {
				out.Graph = open
				continue
			}
			out.External[f.Name] = open
		}
		return out, nil
	}
	return identity.Files{}, ErrNoSource
}

// SourcesOf lists where the models of a build are, one for each.
func SourcesOf(b *index.Build) []index.Source {
	list := []index.Source{b.Source}
	for i := 1; i < len(b.Members); i++ {
		list = append(list, b.Members[i].Source)
	}
	return list
}

// AttemptOf returns an attempt at the request that the build answers, without its models' files.
func AttemptOf(b *index.Build) (*request.Attempt, error) {
	at, err := Attempt(b.UID, b.ModelName, b.ModelDigest, b.Record)
	if err == nil {
		at.Path = b.ModelPath
	}
	return at, err
}

// Attempt returns an attempt at the request of the record.
func Attempt(uid uint32, name string, model cas.Digest, record []byte) (*request.Attempt, error) {
	decoded, err := identity.Decode(record)
	if err != nil {
		return nil, err
	}
	terms, err := decoded.Terms()
	if err != nil {
		return nil, NoSource("the request cannot be restored: %v", err)
	}
	r := &request.Request{CompileTerms: terms.CompileTerms, Peer: request.Peer{UID: uid},
		Name: name, OnMiss: request.Refresh}
	return &request.Attempt{Request: r, Identity: identity.Model{Digest: model, Group: terms.Group},
		SkipServing: new([]index.BuildID), Phase: func(string) {}}, nil
}
