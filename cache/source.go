package cache

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/query"
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
		r, external := j.Request.model(member), make(map[string]*os.File)
		for _, location := range j.copies[member].locations {
			external[location] = r.External[location]
		}
		s, err = j.c.reference(ctx, r.Graph, external, !j.foreign && j.Peer.UID == j.c.uid)
	case KeepCopy:
		s, err = j.copySource(ctx, member, hold)
	default:
		return index.Source{Why: whySwitchedOff}
	}
	if err != nil {
		j.c.log.Info("source model not kept", "model", j.Request.model(member).Name, "why", err)
		return index.Source{Why: whyNotKept(err)}
	}
	return s
}

// reference remembers the paths of a model's files. They come from the descriptors: a path that a
// client states is not used. own: the request is of the daemon's own user. Of other users' requests
// only files that all may read are remembered, because the daemon may be able to open others, and
// the client may not.
func (c *Cache) reference(ctx context.Context, graph *os.File, external map[string]*os.File,
	own bool) (index.Source, error) {
	s := index.Source{Kind: index.SourceReference}
	var err error
	if s.Path, err = c.keptPath(ctx, graph, own); err != nil {
		return index.Source{}, err
	}
	for _, location := range sortedKeys(external) {
		path, err := c.keptPath(ctx, external[location], own)
		if err == nil && !utf8.ValidString(location) {
			err = errors.New("not UTF-8")
		}
		if err != nil {
			return index.Source{}, fmt.Errorf("external data %q: %w", location, err)
		}
		if s.External == nil {
			s.External = make(map[string]string)
		}
		s.External[location] = path
	}
	return s, nil
}

// keptPath is the path of a file that could be opened again by it.
func (c *Cache) keptPath(ctx context.Context, f *os.File, own bool) (string, error) {
	again, err := c.openBounded(ctx, func() (*os.File, error) {
		path, err := pathOf(f)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errNoPath, err)
		}
		return openKept(path, c.uid, own)
	})
	if err != nil {
		return "", err
	}
	return again.Name(), again.Close()
}

// Why a source model is not kept, in words for status, which counts them.
const (
	whySwitchedOff = `keep_source is "none"`
	whyNoPath      = "the application gave bytes, or a file without a path that the daemon sees"
	whyPrivate     = "other users may not read the model"
	whyClosed      = "the daemon's user may not open the model"
	whyElsewhere   = "the model is on FUSE, which a user serves, or on a file system that does not answer"
	whyAnothers    = "the model was another user's, whose build was converted"
	whyFailed      = "the model could not be kept; the daemon's log says why"
)

// Further reasons, which are not recorded in the build.
const (
	whyPut     = "an application gave the compiled model, and not its source"
	whyMissing = "the model was gone, or had changed, when it was to be compiled again"
	whyUnknown = "the model was not kept, by an earlier version"
)

var (
	errNoPath     = errors.New("no path")
	errPrivate    = errors.New("other users may not read it")
	errUnanswered = errors.New("a file system that may never answer")
)

func whyNotKept(err error) string {
	switch {
	case errors.Is(err, fs.ErrPermission): // also of a directory above it
		return whyClosed
	case errors.Is(err, errNoPath):
		return whyNoPath
	case errors.Is(err, errPrivate):
		return whyPrivate
	case errors.Is(err, errUnanswered):
		return whyElsewhere
	}
	return whyFailed
}

// Bounds of opens by remembered paths, which may lead to a file system that never answers.
const (
	openTime    = 5 * time.Second
	maxBlocking = 8 // that did not return in that time
)

// openBounded opens a file on a goroutine of its own, and gives up waiting after openTime.
func (c *Cache) openBounded(ctx context.Context, open func() (*os.File, error)) (*os.File, error) {
	select {
	case c.opening <- struct{}{}:
	default:
		return nil, fmt.Errorf("%w: %d opens of other files have not returned", errUnanswered,
			maxBlocking)
	}
	ctx, end := context.WithTimeout(ctx, openTime)
	defer end()
	type opened struct {
		file *os.File
		err  error
	}
	done := make(chan opened)
	go func() {
		f, err := open()
		<-c.opening
		select {
		case done <- opened{f, err}:
		case <-ctx.Done():
			if f != nil {
				_ = f.Close() // opened for reading only: nothing can be lost
			}
		}
	}()
	select {
	case o := <-done:
		return o.file, o.err
	case <-ctx.Done():
		return nil, fmt.Errorf("%w: not opened in %s", errUnanswered, openTime)
	}
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
func (c *Cache) sourceRequest(ctx context.Context, b *index.Build) (*Request, error) {
	at, err := c.attemptOf(b)
	if err != nil {
		return nil, err
	}
	r := at.Request
	if err := c.openSource(ctx, b, r); err != nil {
		r.close()
		return nil, err
	}
	return r, c.sameModel(ctx, r, at.model)
}

// sourceModels opens the models that the build was made from.
func (c *Cache) sourceModels(ctx context.Context, b *index.Build) (*query.Sources, error) {
	r, err := c.sourceRequest(ctx, b)
	if err != nil {
		return nil, err
	}
	out := &query.Sources{Close: r.close}
	for i := range r.models() {
		one := r.model(i)
		out.Models = append(out.Models, query.SourceModel{Name: one.Name, Graph: one.Graph, External: one.External})
	}
	return out, nil
}

// sameModel compares the models of the request with those that it was made for, and closes them if they are others.
func (c *Cache) sameModel(ctx context.Context, r *Request, made modelIdentity) error {
	id, err := c.identifyAll(ctx, r, false, func(string) {})
	if err == nil && id.Digest == made.Digest && slices.Equal(id.Group, made.Group) {
		return nil
	}
	where := r.Graph.Name()
	r.close()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return noSource("the source model at %q has changed: %v", where, err)
	}
	return noSource("the source model at %q has changed", where)
}

// attemptOf is an attempt at the request that the build answers, without the files of its models.
func (c *Cache) attemptOf(b *index.Build) (*attempt, error) {
	record, err := identity.Decode(b.Record)
	if err != nil {
		return nil, err
	}
	terms, err := record.Terms()
	if err != nil {
		return nil, noSource("the request cannot be made again: %v", err)
	}
	r := requestOf(&terms)
	r.Peer, r.Name, r.OnMiss = Peer{UID: b.UID}, b.ModelName, Refresh
	return ofBuild(r, modelIdentity{Digest: b.ModelDigest, Group: terms.Group}), nil
}

// openSource opens the models that the build was made from. What is open is the request's, also after an error.
func (c *Cache) openSource(ctx context.Context, b *index.Build, r *Request) error {
	err := c.openModel(ctx, b, &b.Source, r)
	for i := 1; i < len(b.Members) && err == nil; i++ {
		m := &b.Members[i]
		one := &Request{Name: m.ModelName}
		err = c.openModel(ctx, b, &m.Source, one)
		r.Group = append(r.Group, ModelFiles{one.Name, one.Graph, one.External})
	}
	return err
}

func (c *Cache) openModel(ctx context.Context, b *index.Build, s *index.Source, r *Request) error {
	r.External = make(map[string]*os.File)
	switch s.Kind {
	case index.SourceReference:
		return c.openReference(ctx, b, s, r)
	case index.SourceCopy:
		for i, f := range s.Files {
			open, err := c.forms.Open(ctx, f.Digest)
			if packing.Lost(err) {
				c.putAsideAll(c.forms.DamageOf(ctx, f.Digest))
			}
			if err != nil {
				return noSource("the copy of the source model: %v", err)
			}
			if i == 0 {
				r.Graph = open
				continue
			}
			r.External[f.Name] = open
		}
		return nil
	}
	return upkeep.ErrNoSource
}

func (c *Cache) openReference(ctx context.Context, b *index.Build, s *index.Source,
	r *Request) error {
	open := func(path string) (*os.File, error) {
		return c.openBounded(ctx, func() (*os.File, error) {
			return openKept(path, c.uid, b.UID == c.uid)
		})
	}
	var err error
	if r.Graph, err = open(s.Path); err != nil {
		return goneSource(err)
	}
	for location, path := range s.External {
		if r.External[location], err = open(path); err != nil {
			delete(r.External, location)
			return goneSource(fmt.Errorf("external data %q: %w", location, err))
		}
	}
	return nil
}

// close closes the files of a request that is the cache's own.
func (r *Request) close() {
	for _, f := range r.files() {
		if f != nil {
			_ = f.Close() // opened for reading only: nothing can be lost
		}
	}
}

// own gives a copy of the request with descriptors of its own, for whoever asked may leave. Of those that stand for several
// files it makes one: a request may name each as often as it likes.
func (r *Request) own() (*Request, error) {
	made := make(map[*os.File]*os.File)
	again := func(f *os.File) (*os.File, error) {
		if made[f] != nil {
			return made[f], nil
		}
		own, err := duplicate(f)
		if err == nil {
			made[f] = own
		}
		return own, err
	}
	out := *r
	out.Group = make([]ModelFiles, len(r.Group))
	for i := range r.models() {
		m, err := r.model(i).ownBy(again)
		if err != nil {
			for _, f := range made {
				_ = f.Close() // opened for reading only: nothing can be lost
			}
			return nil, err
		}
		if i == 0 {
			out.Graph, out.External = m.Graph, m.External
			continue
		}
		out.Group[i-1] = m
	}
	return &out, nil
}

func (f ModelFiles) ownBy(duplicate func(*os.File) (*os.File, error)) (out ModelFiles, err error) {
	out = ModelFiles{Name: f.Name, External: make(map[string]*os.File, len(f.External))}
	if out.Graph, err = duplicate(f.Graph); err != nil {
		return out, err
	}
	for location, one := range f.External {
		if out.External[location], err = duplicate(one); err != nil {
			return out, err
		}
	}
	return out, nil
}
