package views

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
)

// shop is a store of views over one build of two files, with a clock of its own.
type shop struct {
	*testing.T
	dir   string
	blobs *cas.Store
	index *index.Index
	build index.Build
	later time.Duration
	*Store
}

func open(t *testing.T) *shop {
	// what a power cut takes away is tested elsewhere
	dir, err := os.MkdirTemp("/dev/shm", "epcached")
	if err != nil {
		dir = t.TempDir()
	}
	t.Cleanup(func() { require.NoError(t, errors.Join(MakeTreeRemovable(dir), os.RemoveAll(dir))) })
	s := &shop{T: t, dir: dir}
	s.index, err = index.Open(s.dir, index.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.index.Close()) })
	s.blobs, err = cas.Open(s.dir, cas.Options{Stamps: s.index.Stamps()})
	require.NoError(t, err)
	s.build = index.Build{ID: index.BuildID{1}, Scope: "shared", Graph: "m_ctx.onnx"}
	for name, text := range map[string]string{"m_ctx.onnx": "graph", "sub/m.bin": "binary"} {
		d, size, err := s.blobs.Hold().Put(context.Background(), strings.NewReader(text))
		require.NoError(t, err)
		s.build.Files = append(s.build.Files, index.File{Name: name, Digest: d, Size: size})
	}
	c, err := s.index.Stage(context.Background(), s.build)
	require.NoError(t, err)
	s.index.Commit([]*index.Change{c})
	require.NoError(t, c.Err)
	s.start()
	return s
}

// start is that of .
func (s *shop) start() {
	s.Helper()
	shapes, err := packing.Open(packing.Options{Dir: s.dir, Whole: s.blobs, FS: cas.OS{},
		Memory: s.index,
		Log:    slog.New(slog.DiscardHandler)})
	require.NoError(s, err)
	s.Store, err = Open(Options{Dir: filepath.Join(s.dir, "views"), Blobs: s.blobs, Packing: shapes,
		Index: s.index,
		Now:   func() time.Time { return time.Now().Add(s.later) },
		Log:   slog.New(slog.DiscardHandler)})
	require.NoError(s, err)
	s.Cleanup(s.Close)
}

func (s *shop) get() *View {
	s.Helper()
	v, err := s.Get(context.Background(), &s.build, func() {})
	require.NoError(s, err)
	return v
}

func TestAViewStaysWithItsHolder(t *testing.T) {
	s := open(t)
	v := s.get()
	require.Same(t, v, s.CurrentIntact(s.build.ID))
	f, err := v.Lease()
	require.NoError(t, err)
	held, err := v.Leased()
	require.NoError(t, err)
	require.True(t, held)
	s.Drop(s.build.ID, v, 0)
	require.Nil(t, s.CurrentView(s.build.ID))
	_, err = v.Lease()
	require.ErrorIs(t, err, fs.ErrNotExist, "nobody new gets it")
	s.Sweep()
	text, err := os.ReadFile(filepath.Join(v.Path(), v.GraphPath()))
	require.NoError(t, err)
	require.Equal(t, "graph", string(text))
	require.NoError(t, f.Close())
	s.Sweep()
	require.NoDirExists(t, v.Path())
	again := s.get()
	require.NotEqual(t, v.ID(), again.ID(), "a path is never used for two contents")
}

func TestPathOfAViewIsValidForAWhile(t *testing.T) {
	s := open(t)
	v := s.get()
	require.True(t, v.PathGraceEnd().IsZero())
	s.NotePathGiven(v)
	require.Contains(t, v.PathGraceEnd().String(), " m=", "whatever the clock is set to meanwhile")
	s.Drop(s.build.ID, v, PathGrace)
	s.Sweep()
	require.DirExists(t, v.Path())
	s.later = PathGrace + time.Second
	s.Sweep()
	require.NoDirExists(t, v.Path())
}

func TestViewsOfEarlierRuns(t *testing.T) {
	s := open(t)
	v := s.get()
	stranger := filepath.Join(s.dir, "views", "shared", NewID())
	require.NoError(t, os.Mkdir(stranger, 0o700))
	s.start()
	require.Nil(t, s.CurrentView(s.build.ID))
	require.Equal(t, v.Path(), s.ForBuild(&s.build).Path())
	require.NoError(t, s.DropUnknown(context.Background()))
	s.Sweep()
	require.NoDirExists(t, stranger)
	require.Equal(t, v.ID(), s.get().ID(), "a sound one is used again")
}

// A file without the name of a view, or a link, is not the store's.
func TestForeignFilesAmongTheViewsStay(t *testing.T) {
	s := open(t)
	v := s.get()
	elsewhere, views := filepath.Join(s.dir, "elsewhere"), filepath.Join(s.dir, "views")
	precious := filepath.Join(elsewhere, NewID(), NewID(), "model.onnx")
	mine := filepath.Join(views, "mine", NewID(), "notes.txt")
	note := filepath.Join(views, "shared", "notes", "notes.txt")
	for _, path := range []string{precious, mine, note} {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte("precious"), 0o644))
	}
	links := []string{filepath.Join(views, "link"), filepath.Join(views, "uid-7"),
		filepath.Join(views, "shared", NewID())}
	for _, link := range links {
		require.NoError(t, os.Symlink(elsewhere, link))
	}
	// and the view of a build becomes one
	require.NoError(t, os.Rename(v.Path(), filepath.Join(elsewhere, "view")))
	require.NoError(t, os.Symlink(filepath.Join(elsewhere, "view"), v.Path()))
	s.start()
	require.NoError(t, s.DropUnknown(context.Background()))
	s.Drop(s.build.ID, v, 0)
	s.Sweep()
	require.Empty(t, s.dropped, "it is reported once")
	for _, path := range []string{precious, mine, note,
		filepath.Join(elsewhere, "view", v.GraphPath())} {
		require.FileExists(t, path)
	}
	for _, link := range append(links, v.Path()) {
		_, err := os.Lstat(link)
		require.NoError(t, err)
	}
	require.NotEqual(t, v.Path(), s.get().Path())
}

// Two callers may find the view of an earlier run at the same time, and each opens it.
func TestAViewThatIsDroppedTwiceIsClosed(t *testing.T) {
	s := open(t)
	s.get()
	s.start()
	one, two := s.ForBuild(&s.build), s.ForBuild(&s.build)
	s.Drop(s.build.ID, one, 0)
	s.Drop(s.build.ID, two, 0)
	s.Sweep()
	require.NoDirExists(t, one.Path())
	for _, v := range []*View{one, two} {
		require.ErrorIs(t, v.inner.Close(), os.ErrClosed)
	}
}

// A view of a large build takes long to verify, and a request for another one has a deadline.
func TestAWaitForTheViewOfAnotherBuildEndsWithItsContext(t *testing.T) {
	s := open(t)
	var err error
	s.blobs, err = cas.Open(s.dir, cas.Options{}) // which has not verified any blob
	require.NoError(t, err)
	s.start()
	ctx, cancel := context.WithCancel(t.Context())
	began, end, done := make(chan struct{}, 2), make(chan struct{}), make(chan error)
	go func() {
		_, err := s.Get(t.Context(), &s.build, func() { began <- struct{}{}; <-end })
		done <- err
	}()
	<-began
	go func() {
		_, err := s.Get(ctx, &s.build, func() {})
		done <- err
	}()
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	close(end)
	require.NoError(t, <-done)
}

func TestAFileThatIsAnotherMakesAnotherView(t *testing.T) {
	s := open(t)
	v := s.get()
	inner := filepath.Join(v.Path(), v.ID())
	require.NoError(t, MakeTreeRemovable(inner))
	require.NoError(t, os.Remove(filepath.Join(inner, "m_ctx.onnx")))
	require.NoError(t, os.WriteFile(filepath.Join(inner, "m_ctx.onnx"), []byte("other"), 0o444))
	require.Nil(t, s.CurrentIntact(s.build.ID))
	require.NotEqual(t, v.ID(), s.get().ID())
}

// An application of the daemon's own user may write into a view: what it leaves there is served to
// no other.
func TestAFileTooManyMakesAnotherView(t *testing.T) {
	s := open(t)
	for _, restarted := range []bool{false, true} {
		v := s.get()
		require.NoError(t, os.WriteFile(filepath.Join(v.Path(), v.ID(), "cache.bin"), nil, 0o600))
		if restarted {
			s.start()
		}
		require.Nil(t, s.CurrentIntact(s.build.ID))
		require.NotEqual(t, v.ID(), s.get().ID())
	}
}

func TestTheOwnerMayRemoveAView(t *testing.T) {
	s := open(t)
	v := s.get()
	for _, dir := range []string{v.Path(), filepath.Join(v.Path(), v.ID()),
		filepath.Join(v.Path(), v.ID(), "sub")} {
		info, err := os.Stat(dir)
		require.NoError(t, err)
		require.Equal(t, fs.FileMode(0o755), info.Mode().Perm(), dir)
	}
}

// Clients that load by path would get what lies there now.
func TestAViewThatWasMovedIsNotLeased(t *testing.T) {
	s := open(t)
	v := s.get()
	require.NoError(t, os.Rename(v.Path(), v.Path()+"-moved"))
	require.NoError(t, os.MkdirAll(filepath.Join(v.Path(), v.ID()), 0o700)) // another in its place
	_, err := v.Lease()
	require.ErrorIs(t, err, fs.ErrNotExist)
}
