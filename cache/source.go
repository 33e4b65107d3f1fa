package cache

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"unicode/utf8"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
)

// How source models are kept: Options.KeepSource.
const (
	// remember the paths of files of the daemon's own user, and of files that all may read
	KeepReference = "reference"
	KeepCopy      = "copy" // put every file into the store
	KeepNone      = "none"
)

func checkKeepSource(how string) (string, error) {
	switch how {
	case "":
		return KeepReference, nil
	case KeepReference, KeepCopy, KeepNone:
		return how, nil
	}
	return "", fmt.Errorf("source models are kept as %q: it is one of %s, %s, %s", how, KeepReference, KeepCopy, KeepNone)
}

// keepSource says where one of the job's models will be found again. A source that cannot be kept
// fails nothing: the build then waits for its next request when it has to be compiled again, and
// says why. hold keeps the blobs of a copy until the build is published.
func (j *job) keepSource(ctx context.Context, member int, hold *cas.Hold) index.Source {
	how := j.c.settings.Load().keepSource
	if member < len(j.sources) && how != KeepNone && j.sources[member].Kind == index.SourceCopy && keepAll(ctx, hold, j.sources[member].Files) {
		return j.sources[member] // compiled from there just now; a path of it would be one in the store
	}
	var s index.Source
	var err error
	switch how {
	case KeepReference:
		f, external := j.Request.ModelFiles(member), make(map[string]*os.File)
		for _, location := range j.copies[member].locations {
			external[location] = f.External[location]
		}
		f.External = external
		s, err = j.c.sources.Reference(ctx, f, !j.foreign && j.Peer.UID == j.c.uid)
	case KeepCopy:
		s, err = j.copySource(ctx, member, hold)
	default:
		return index.Source{Why: index.WhySwitchedOff}
	}
	if err != nil {
		j.c.log.Info("source model not kept", "model", j.Request.ModelFiles(member).Name, "why", err)
		return index.Source{Why: whyNotKept(err)}
	}
	return s
}

func whyNotKept(err error) string {
	switch {
	case errors.Is(err, fs.ErrPermission): // also of a directory above it
		return index.WhyClosed
	case errors.Is(err, identity.ErrNoPath):
		return index.WhyNoPath
	case errors.Is(err, identity.ErrPrivate):
		return index.WhyPrivate
	case errors.Is(err, identity.ErrUnanswered):
		return index.WhyElsewhere
	}
	return index.WhyFailed
}

// keepAll tells whether all of the files are blobs that will stay.
func keepAll(ctx context.Context, hold *cas.Hold, files []index.File) bool {
	return !slices.ContainsFunc(files, func(f index.File) bool {
		there, err := hold.Keep(ctx, f.Digest)
		return err != nil || !there
	})
}

// copySource makes blobs of what was compiled.
func (j *job) copySource(ctx context.Context, member int, hold *cas.Hold) (index.Source, error) {
	s := index.Source{Kind: index.SourceCopy}
	add := func(location, path string, open func() (*os.File, error)) error {
		f := index.File{Name: location}
		if !utf8.ValidString(location) {
			return fmt.Errorf("external data %q: not UTF-8", location)
		}
		if there, ok := j.kept[path]; ok { // for another of the group: the place for it is taken, and there is none for one more
			there.Name = location
			s.Files = append(s.Files, there)
			return nil
		}
		from, err := open()
		if err != nil {
			return err
		}
		if err = room(j.folder, []*os.File{from}); err == nil {
			f.Digest, f.Size, err = hold.PutFile(ctx, from)
		}
		if err == nil {
			j.kept[path] = f
		}
		s.Files = append(s.Files, f)
		return errors.Join(err, from.Close())
	}
	model := j.copies[member]
	if err := add("", model.path, model.openGraph); err != nil {
		return index.Source{}, err
	}
	if model.original != nil {
		if err := model.original.proof(); err != nil {
			return index.Source{}, err // what was copied may be something else
		}
	}
	for _, location := range model.locations {
		path := filepath.Join(filepath.Dir(model.path), filepath.FromSlash(location))
		if err := add(location, path, func() (*os.File, error) { return os.Open(path) }); err != nil {
			return index.Source{}, err
		}
	}
	return s, nil
}

// sourceError is upkeep.ErrNoSource with what became of the one that was.
type sourceError struct{ text string }

func (e *sourceError) Error() string        { return e.text }
func (e *sourceError) Is(target error) bool { return target == upkeep.ErrNoSource }

func goneSource(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return noSource("the source model is gone: %v", err)
	}
	return noSource("the source model cannot be opened: %v", err)
}

func noSource(format string, args ...any) error { return &sourceError{fmt.Sprintf(format, args...)} }

// sourceRequest gives the request that the build answers, with the model's files open, which the caller closes. The
// error wraps upkeep.ErrNoSource if there is no model, or another one than the build was made from.
func (c *Cache) sourceRequest(ctx context.Context, b *index.Build) (*request.Request, error) {
	at, err := c.attemptOf(b)
	if err != nil {
		return nil, err
	}
	names := []string{b.ModelName}
	for i := 1; i < len(b.Members); i++ {
		names = append(names, b.Members[i].ModelName)
	}
	return c.reopened(ctx, at, names, sourcesOf(b))
}

// reopened gives the attempt's request with its models open, which have these names and sources.
func (c *Cache) reopened(ctx context.Context, at *request.Attempt, names []string, sources []index.Source) (*request.Request, error) {
	var open []identity.Files
	for i := range sources {
		f, err := c.openSource(ctx, &sources[i], at.Peer.UID == c.uid)
		if err != nil {
			identity.Close(open...)
			return nil, err
		}
		f.Name = names[i]
		open = append(open, f)
	}
	r := at.Request.WithModels(open)
	return r, c.sameModel(ctx, r, at.Identity)
}

// sourceModels opens the models that the build was made from.
func (c *Cache) sourceModels(ctx context.Context, b *index.Build) ([]identity.Files, error) {
	r, err := c.sourceRequest(ctx, b)
	if err != nil {
		return nil, err
	}
	return r.AllModels(), nil
}

// sameModel compares the models of the request with those that it was made for, and closes them if they are others.
func (c *Cache) sameModel(ctx context.Context, r *request.Request, made identity.Model) error {
	id, err := c.models.Identify(ctx, &identity.Asked{UID: r.Peer.UID, Models: r.AllModels(), Phase: func(string) {}})
	if err == nil && id.Digest == made.Digest && slices.Equal(id.Group, made.Group) {
		return nil
	}
	where := r.Graph.Name()
	r.Close()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return noSource("the source model at %q has changed: %v", where, err)
	}
	return noSource("the source model at %q has changed", where)
}

// attemptOf is an attempt at the request that the build answers, without the files of its models.
func (c *Cache) attemptOf(b *index.Build) (*request.Attempt, error) {
	return attemptAt(b.UID, b.ModelName, b.ModelDigest, b.Record)
}

// attemptAt is an attempt at the request of the record.
func attemptAt(uid uint32, name string, model cas.Digest, record []byte) (*request.Attempt, error) {
	decoded, err := identity.Decode(record)
	if err != nil {
		return nil, err
	}
	terms, err := decoded.Terms()
	if err != nil {
		return nil, noSource("the request cannot be made again: %v", err)
	}
	r := request.FromTerms(&terms)
	r.Peer, r.Name, r.OnMiss = request.Peer{UID: uid}, name, request.Refresh
	return &request.Attempt{Request: r, Identity: identity.Model{Digest: model, Group: terms.Group},
		Unserved: new([]index.BuildID), Phase: func(string) {}}, nil
}

// openSource opens one of the models that a build was made from. own: for the daemon's own user.
func (c *Cache) openSource(ctx context.Context, s *index.Source, own bool) (identity.Files, error) {
	switch s.Kind {
	case index.SourceReference:
		f, err := c.sources.Open(ctx, s, own)
		if err != nil {
			return f, goneSource(err)
		}
		return f, nil
	case index.SourceCopy:
		out := identity.Files{External: make(map[string]*os.File)}
		for i, f := range s.Files {
			open, err := c.forms.Open(ctx, f.Digest)
			if packing.Lost(err) {
				c.store.QuarantineAll(c.forms.DamageOf(ctx, f.Digest))
			}
			if err != nil {
				identity.Close(out)
				return out, noSource("the copy of the source model: %v", err)
			}
			if i == 0 {
				out.Graph = open
				continue
			}
			out.External[f.Name] = open
		}
		return out, nil
	}
	return identity.Files{}, upkeep.ErrNoSource
}
