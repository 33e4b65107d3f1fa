package build

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
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// How source models are kept: Options.KeepSource.
const (
	// remember the paths of files of the daemon's own user, and of files that all may read
	KeepReference = "reference"
	KeepCopy      = "copy" // put every file into the store
	KeepNone      = "none"
)

// CheckKeepSource returns how source models are kept, KeepReference for "".
func CheckKeepSource(how string) (string, error) {
	switch how {
	case "":
		return KeepReference, nil
	case KeepReference, KeepCopy, KeepNone:
		return how, nil
	}
	return "", fmt.Errorf("source models are kept as %q: it is one of %s, %s, %s",
		how, KeepReference, KeepCopy, KeepNone)
}

// keepSource says where one of the job's models will be found again. A source that cannot be kept
// fails nothing: the build then waits for its next request when it has to be compiled again, and
// says why. hold keeps the blobs of a copy until the build is published.
func (j *Job) keepSource(ctx context.Context, member int, hold *cas.Hold) index.Source {
	how := j.bd.Settings().KeepSource
	var s index.Source
	if member < len(j.again.Sources) {
		s = j.again.Sources[member]
	}
	if how != KeepNone && s.Kind == index.SourceCopy && keepAll(ctx, hold, s.Files) {
		return s // compiled from there just now; a path of it would be one in the store
	}
	var err error
	switch how {
	case KeepReference:
		f, external := j.Request.ModelFiles(member), make(map[string]*os.File)
		for _, location := range j.Copies[member].Locations {
			external[location] = f.External[location]
		}
		f.External = external
		s, err = j.bd.Sources.Reference(ctx, f, !j.again.Foreign && j.Peer.UID == j.bd.UID)
	case KeepCopy:
		s, err = j.copySource(ctx, member, hold)
	default:
		return index.Source{Why: index.WhySwitchedOff}
	}
	if err != nil {
		j.bd.Log.Info("source model not kept",
			"model", j.Request.ModelFiles(member).Name, "why", err)
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
func (j *Job) copySource(ctx context.Context, member int, hold *cas.Hold) (index.Source, error) {
	s := index.Source{Kind: index.SourceCopy}
	add := func(location, path string, open func() (*os.File, error)) error {
		f := index.File{Name: location}
		if !utf8.ValidString(location) {
			return fmt.Errorf("external data %q: not UTF-8", location)
		}
		if there, ok := j.kept[path]; ok { // for another of the group; no space is reserved for two
			there.Name = location
			s.Files = append(s.Files, there)
			return nil
		}
		from, err := open()
		if err != nil {
			return err
		}
		if err = workspace.Room(j.Folder, []*os.File{from}); err == nil {
			f.Digest, f.Size, err = hold.PutFile(ctx, from)
		}
		if err == nil {
			j.kept[path] = f
		}
		s.Files = append(s.Files, f)
		return errors.Join(err, from.Close())
	}
	model := j.Copies[member]
	if err := add("", model.Path, model.OpenGraph); err != nil {
		return index.Source{}, err
	}
	if model.Original != nil {
		if err := model.Original.Proof(); err != nil {
			return index.Source{}, err // what was copied may be something else
		}
	}
	for _, location := range model.Locations {
		path := filepath.Join(filepath.Dir(model.Path), filepath.FromSlash(location))
		open := func() (*os.File, error) { return os.Open(path) }
		if err := add(location, path, open); err != nil {
			return index.Source{}, err
		}
	}
	return s, nil
}

// original returns the job's model in its owner's file. It returns nil where a private copy has to
// be made, because no stamp vouches for the file or the compiler needs a copy. Models of several
// files are copied, because execution providers refuse files that do not lie in one folder.
func (j *Job) original(ctx context.Context, spec compilers.Job) *workspace.Original {
	opener, ok := j.bd.Compiler.(compilers.Opener)
	if !ok || j.copied || j.Request.Models() > 1 || j.VerifyOutput != 0 {
		return nil
	}
	stamp, ok := j.bd.Models.Stamp(j.Peer.UID, j.Request.ModelFiles(0), j.Plan.Canonical.Model)
	if !ok {
		return nil
	}
	file, err := workspace.OpenAgain(j.Graph)
	if err != nil {
		return nil // others may not read it; its user sent it open
	}
	o := &workspace.Original{File: file, Stamp: stamp}
	spec.ModelFile = o.File
	m, err := identity.Files{Name: j.Request.Name, Graph: file}.Read(ctx)
	if err != nil || len(m.Locations()) > 0 || !opener.TakesOpen(spec) {
		o.Close()
		return nil // what is wrong with the model its copy tells
	}
	j.UseOriginal(spec.Model, o, m)
	return o
}
