package cache

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/readonly"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/flock"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/store/views"
)

// readStored is read for an answer that has no view.
func (b *bench) readStored(s *readonly.Store, a *request.Answer) map[string]string {
	b.Helper()
	files := make(map[string]string)
	for _, f := range a.Build.Files {
		in, err := s.Open(a, f)
		require.NoError(b, err)
		h := sha256.New()
		_, err = io.Copy(h, in)
		require.NoError(b, err)
		require.NoError(b, in.Close())
		files[f.Name] = fmt.Sprintf("%x", h.Sum(nil))
	}
	return files
}

// leftPacked is a store with two builds that its daemon has left, the second of them packed and
// without a view.
func leftPacked(t *testing.T) (b *bench, build *index.Build, had map[string]string) {
	b, builds, files := packedPair(t)
	b.cache.views.Sweep()
	b.close()
	return b, builds[1], files[1]
}

func (b *bench) unpacked(dir string) (*request.Answer, error) {
	b.Helper()
	s := b.stored()
	a, err := s.Find(context.Background(), b.variant(2), "")
	require.NoError(b, err)
	require.Nil(b, a.View)
	if err = s.Unpack(context.Background(), a, dir, nil); err == nil {
		b.Cleanup(func() { a.View.Close() })
	}
	return a, err
}

func TestAPackedStoredBuildIsUnpackedOutsideTheStore(t *testing.T) {
	b, build, had := leftPacked(t)
	before := listFiles(t, b.state)
	dir := filepath.Join(t.TempDir(), "new", "unpacked")
	s := b.stored()
	a, err := s.Find(context.Background(), b.variant(2), "")
	require.NoError(t, err)
	require.Equal(t, request.Hit, a.Outcome)
	require.Equal(t, build.ID, a.Build.ID)
	require.Nil(t, a.View)
	require.Equal(t, had, b.readStored(s, a))

	var last, total int64
	require.NoError(t, s.Unpack(context.Background(), a, dir, func(done, of int64) {
		require.Greater(t, done, last)
		last, total = done, of
	}))
	defer a.View.Close()
	require.Equal(t, had, b.read(a))
	require.Equal(t, total, last)
	require.True(t, strings.HasPrefix(a.Path, dir+"/"), a.Path)
	require.Equal(t, before, listFiles(t, b.state))

	for _, directory := range []string{dir, a.Path} {
		info, err := os.Stat(directory)
		require.NoError(t, err)
		require.Zero(t, info.Mode().Perm()&0o022, directory)
	}
	again, err := b.unpacked(dir)
	require.NoError(t, err)
	require.Equal(t, a.Path, again.Path, "what is there is taken")
	require.Equal(t, a.Graph, again.Graph)
}

func TestManyUnpackTheSameAtOnce(t *testing.T) {
	b, _, had := leftPacked(t)
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o700))
	r, s := b.variant(2), b.stored()
	paths := make([]string, 8)
	var all sync.WaitGroup
	for i := range paths {
		all.Go(func() {
			one := *r
			a, err := s.Find(context.Background(), &one, "")
			if err == nil {
				err = s.Unpack(context.Background(), a, dir, nil)
			}
			if err == nil {
				paths[i] = a.Path
				err = a.View.Close()
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	for _, path := range paths {
		require.Equal(t, paths[0], path)
	}
	a, err := b.unpacked(dir)
	require.NoError(t, err)
	require.Equal(t, had, b.read(a))
	found, err := filepath.Glob(filepath.Join(dir, "[0-9a-f]*"))
	require.NoError(t, err)
	require.Len(t, found, 1)
}

func TestDamagedUnpackedFileIsReplaced(t *testing.T) {
	b, build, had := leftPacked(t)
	dir := filepath.Join(t.TempDir(), "unpacked")
	first, err := b.unpacked(dir)
	require.NoError(t, err)
	path := filepath.Join(first.Path, filepath.Dir(first.Graph), build.Files[0].Name)
	for _, damage := range []func(){
		func() {
			require.NoError(t, os.Chmod(path, 0o600))
			file, err := os.OpenFile(path, os.O_WRONLY, 0)
			require.NoError(t, err)
			_, err = file.WriteAt([]byte("!"), build.Files[0].Size/2)
			require.NoError(t, err)
			require.NoError(t, file.Close())
		},
		func() { require.NoError(t, os.Remove(path)) },
	} {
		damage()
		again, err := b.unpacked(dir)
		require.NoError(t, err)
		require.Equal(t, first.Path, again.Path)
		require.Equal(t, had, b.read(again))
	}
}

func TestUnusedUnpackedBuildsAreRemoved(t *testing.T) {
	b, _, _ := leftPacked(t)
	dir := filepath.Join(t.TempDir(), "unpacked")
	old, held, young := filepath.Join(dir, "0123-4567"), filepath.Join(dir, "4567-89ab"),
		filepath.Join(dir, "89ab-cdef")
	past := time.Now().Add(-32 * 24 * time.Hour)
	for _, directory := range []string{old, held, young} {
		require.NoError(t, os.MkdirAll(filepath.Join(directory, "id"), 0o700))
		require.NoError(t, views.MakeTreeReadable(directory))
		if directory != young {
			require.NoError(t, os.Chtimes(directory, past, past))
		}
	}
	require.NoError(t, os.Chmod(dir, 0o700))
	lease, err := os.Open(held)
	require.NoError(t, err)
	defer lease.Close()
	require.NoError(t, flock.Lease(lease))
	_, err = b.unpacked(dir)
	require.NoError(t, err)
	require.NoDirExists(t, old)
	require.DirExists(t, held)
	require.DirExists(t, young)
}

func TestADirectoryThatIsNotTheCallersAloneIsNotUnpackedInto(t *testing.T) {
	b, _, _ := leftPacked(t)
	open := filepath.Join(t.TempDir(), "open")
	require.NoError(t, os.Mkdir(open, 0o700))
	require.NoError(t, os.Chmod(open, 0o777))
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(t.TempDir(), link))
	for name, dir := range map[string]string{"others may write": open, "a file": file,
		"a link": link, "below a file": filepath.Join(file, "x")} {
		_, err := b.unpacked(dir)
		require.Equal(t, apierr.NotAllowed, apierr.ClassOf(err), name)
	}
}

// Packed blobs are verified as whole ones are: the recipe, each base, and the result.
func TestAPackedStoredBuildWithDamageIsNotServed(t *testing.T) {
	b, build, _ := leftPacked(t)
	recipe := filepath.Join(b.state, "recipes", large(build).String()[:2], large(build).String())
	read, err := os.ReadFile(recipe)
	require.NoError(t, err)
	var base string
	for i := range b.stored().Builds {
		if one := &b.stored().Builds[i]; one.ID != build.ID {
			base = filepath.Join(b.state, "objects", large(one).String()[:2],
				large(one).String())
		}
	}
	whole, err := os.ReadFile(base)
	require.NoError(t, err)
	change := func(path string, data []byte) {
		require.NoError(t, os.Remove(path))
		if data != nil {
			require.NoError(t, os.WriteFile(path, data, 0o600))
		}
	}
	flipped := func(data []byte) []byte {
		data = append([]byte{}, data...)
		data[len(data)/2] ^= 1
		return data
	}
	for name, tc := range map[string]struct {
		path         string
		right, wrong []byte
	}{
		"recipe":         {recipe, read, flipped(read)},
		"shorter recipe": {recipe, read, read[:len(read)-1]},
		"base":           {base, whole, flipped(whole)},
		"shorter base":   {base, whole, whole[:len(whole)-1]},
		"no base":        {base, whole, nil},
	} {
		change(tc.path, tc.wrong)
		_, err := b.stored().Find(context.Background(), b.variant(2), "")
		require.Error(t, err, name)
		require.True(t, packing.IsMissingOrDamaged(err), "%s: %v", name, err)
		require.ErrorContains(t, err, build.BuildKey.String()[:12], name)
		if tc.wrong == nil {
			require.NoError(t, os.WriteFile(tc.path, nil, 0o600))
		}
		change(tc.path, tc.right)
	}
	require.NoError(t, os.Remove(recipe))
	e := b.notFound(b.variant(2), "")
	require.Contains(t, e.Text, "is not in")
	require.NoError(t, os.Mkdir(recipe, 0o700))
	_, err = b.stored().Find(context.Background(), b.variant(2), "")
	require.True(t, packing.IsMissingOrDamaged(err), "%v", err)
}

// The unpacked copy that a daemon left may be torn, because it was never synced; only the recipe
// counts.
func TestAnUnpackedFormThatADaemonLeftIsNotBelieved(t *testing.T) {
	b, _, files := packedPair(t)
	a := b.acquire(b.variant(2))
	require.NoError(t, a.View.Close())
	b.close()
	served, err := b.stored().Find(context.Background(), b.variant(2), "")
	require.NoError(t, err)
	require.NotNil(t, served.View, "it is there, and is taken")
	require.Equal(t, files[1], b.read(served))
	require.NoError(t, served.View.Close())
	path := filepath.Join(a.Path, filepath.Dir(a.Graph), a.Build.Files[0].Name)
	for _, f := range a.Build.Files {
		if f.Digest == large(a.Build) {
			path = filepath.Join(a.Path, filepath.Dir(a.Graph), f.Name)
		}
	}
	require.NoError(t, os.Chmod(path, 0o600))
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = file.WriteAt(make([]byte, 4096), 4096)
	require.NoError(t, err)
	require.NoError(t, file.Close())
	s := b.stored()
	proven, err := s.Find(context.Background(), b.variant(2), "")
	require.NoError(t, err)
	require.Nil(t, proven.View)
	require.Equal(t, files[1], b.readStored(s, proven))
}

func TestAStoredBuildIsTakenWhereANewerOneIsDamaged(t *testing.T) {
	b, r, had := newStoppedStore(t)
	found := b.stored().Builds[0]
	// The same build key in the user's own scope, newer, and without its files.
	s := b.stored()
	other := found
	other.ID = index.BuildID{1}
	other.Scope, other.Created = rights.OwnScope(request.Peer{UID: uint32(os.Getuid())}),
		found.Created.Add(time.Hour)
	other.Files = append([]index.File{}, found.Files...)
	other.Files[0].Digest = cas.Digest{1}
	s.Builds = append(s.Builds, other)
	a, err := s.Find(context.Background(), r, "")
	require.NoError(t, err)
	defer a.View.Close()
	require.Equal(t, found.ID, a.Build.ID)
	require.Equal(t, had, b.read(a))
	require.Contains(t, strings.Join(a.Warnings, " "), "is skipped: build")
}
