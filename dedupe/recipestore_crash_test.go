package dedupe_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cas/crashfs"
	"github.com/epcached/epcached/dedupe"
)

// inRecipeStore is a recipe of a blob of n bytes, all of them from a base of that name.
func inRecipeStore(blob, base string, n int64) *dedupe.Recipe {
	return &dedupe.Recipe{
		Blob: blake3.Sum256([]byte(blob)), Size: n, Literals: dedupe.NoLiterals,
		Bases:   []dedupe.Base{{Digest: blake3.Sum256([]byte(base)), Size: 2 * n}},
		Extents: []dedupe.Extent{{Length: n, From: n}},
	}
}

func memoryDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "dedupe")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

var (
	early = inRecipeStore("blob", "base", 1000)
	later = inRecipeStore("blob", "rewritten base", 1000)
	other = inRecipeStore("other blob", "base", 500)
)

// recipeStoreOperation is one call; what may stand under the blob's name when it was not
// acknowledged is in may, nil for nothing, and after is what has to stand there when it was.
type recipeStoreOperation struct {
	name  string
	run   func(s *dedupe.RecipeStore) error
	blob  cas.Digest
	may   []*dedupe.Recipe
	after *dedupe.Recipe
}

func recipeStoreOperations() []recipeStoreOperation {
	put := func(r *dedupe.Recipe) func(s *dedupe.RecipeStore) error {
		return func(s *dedupe.RecipeStore) error { return s.Put(r, nil) }
	}
	return []recipeStoreOperation{
		{"put", put(other), other.Blob, []*dedupe.Recipe{nil, other}, other},
		{"replace", put(later), early.Blob, []*dedupe.Recipe{early, later}, later},
		{"remove", func(s *dedupe.RecipeStore) error { return s.Remove(early.Blob) }, early.Blob,
			[]*dedupe.Recipe{early, nil}, nil},
		{"quarantine", func(s *dedupe.RecipeStore) error {
			return s.Quarantine(early.Blob, "a test")
		},
			early.Blob, []*dedupe.Recipe{early, nil}, nil},
	}
}

// requireRecipeStore opens what a crash has left: one of the recipes that may be there stands under
// the blob's name, whole, and its bases have it as a user. It gives that recipe, nil for none.
func requireRecipeStore(t *testing.T, dir string, blob cas.Digest,
	may []*dedupe.Recipe) *dedupe.Recipe {
	t.Helper()
	s, err := dedupe.OpenRecipeStore(dir, nil)
	require.NoError(t, err)
	require.Empty(t, s.Problems(), "nothing is ever half there")
	got, err := s.Get(blob)
	if errors.Is(err, cas.ErrNotFound) {
		require.Contains(t, may, (*dedupe.Recipe)(nil))
		_, known := s.Has(blob)
		require.False(t, known)
	} else {
		require.NoError(t, err)
		require.True(t,
			slices.ContainsFunc(may,
				func(r *dedupe.Recipe) bool { return r != nil && r.Equal(got) }), "%+v", got)
		for _, c := range got.Bases {
			require.Contains(t, s.Users(c.Digest), blob)
		}
	}
	left, err := os.ReadDir(filepath.Join(dir, "recipes", "incoming"))
	require.NoError(t, err)
	require.Empty(t, left)
	return got
}

func startRecipeStore(t *testing.T) (fs *crashfs.FS, s *dedupe.RecipeStore) {
	t.Helper()
	root := memoryDir(t)
	state := filepath.Join(root, "state")
	require.NoError(t, os.MkdirAll(filepath.Join(state, "quarantine"), 0o700))
	s, err := dedupe.OpenRecipeStore(state, nil)
	require.NoError(t, err)
	err = s.Put(early, nil)
	require.NoError(t, err)
	fs, err = crashfs.New(root)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, fs.Close()) })
	s, err = dedupe.OpenRecipeStore(state, fs)
	require.NoError(t, err)
	return fs, s
}

// requireRecipeStoreAfterCrash returns the recipes that crashes have left.
func requireRecipeStoreAfterCrash(t *testing.T, fs *crashfs.FS, blob cas.Digest,
	may ...*dedupe.Recipe) (left []*dedupe.Recipe) {
	t.Helper()
	for i, loss := range []crashfs.Loss{crashfs.Nothing, crashfs.Everything, crashfs.Some,
		crashfs.Some, crashfs.Some} {
		after := memoryDir(t)
		require.NoError(t, fs.Crash(after, loss, uint64(fs.Steps()+i)))
		if got := requireRecipeStore(t, filepath.Join(after, "state"), blob, may); got != nil {
			left = append(left, got)
		}
		require.NoError(t, os.RemoveAll(after))
	}
	return left
}

func TestRecipeStoreStoppedAtEveryStep(t *testing.T) {
	for _, op := range recipeStoreOperations() {
		t.Run(op.name, func(t *testing.T) {
			for step := 1; ; step += crashfs.Stride {
				fs, s := startRecipeStore(t)
				before := fs.Steps()
				fs.StopAt(before + step)
				err := op.run(s)
				if err == nil {
					requireRecipeStoreAfterCrash(t, fs, op.blob, op.after)
				} else {
					requireRecipeStoreAfterCrash(t, fs, op.blob, op.may...)
				}
				if fs.Steps() < before+step { // it was over before the stop
					require.NoError(t, err)
					require.Greater(t, step, 2, "the operation has no steps")
					return
				}
			}
		})
	}
}

// A failed removal succeeds when it is retried. Until then the bases are kept of a recipe that
// a crash could restore.
func TestRecipeStoreFailingAtEveryStep(t *testing.T) {
	for _, op := range recipeStoreOperations() {
		t.Run(op.name, func(t *testing.T) {
			for step := 1; ; step += crashfs.Stride {
				fs, s := startRecipeStore(t)
				before := fs.Steps()
				fs.FailAt(before+step, []error{syscall.EIO, syscall.ENOSPC}[step%2])
				if err := op.run(s); err != nil {
					for _, r := range requireRecipeStoreAfterCrash(t, fs, op.blob, op.may...) {
						for _, c := range r.Bases {
							require.Contains(t, s.Users(c.Digest), op.blob)
						}
					}
					if err = op.run(s); err != nil {
						require.ErrorIs(t, err, cas.ErrNotFound)
					}
				}
				requireRecipeStoreAfterCrash(t, fs, op.blob, op.after)
				if fs.Steps() < before+step {
					return
				}
			}
		})
	}
}

// The first recipe of a store is there after a power cut, in directories that were made a moment
// ago, also where an earlier start was stopped while it made them.
func TestRecipeStoreKeepsTheFirstRecipe(t *testing.T) {
	for stopped := range 4 {
		root := memoryDir(t)
		state := filepath.Join(root, "state")
		require.NoError(t, os.MkdirAll(filepath.Join(state, "quarantine"), 0o700))
		fs, err := crashfs.New(root)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, fs.Close()) })
		fs.StopAt(stopped) // 0: it is not
		if stopped > 0 {
			_, err = dedupe.OpenRecipeStore(state, fs)
			require.ErrorIs(t, err, crashfs.ErrStopped)
			fs.StopAt(0)
		}
		s, err := dedupe.OpenRecipeStore(state, fs)
		require.NoError(t, err)
		err = s.Put(early, nil)
		require.NoError(t, err)
		requireRecipeStoreAfterCrash(t, fs, early.Blob, early)
	}
}

// A damaged recipe that was reported, and moved, is reported once.
func TestRecipeStoreQuarantinesDamageDurably(t *testing.T) {
	root := memoryDir(t)
	path := filepath.Join(root, "state", "recipes", early.Blob.String()[:2], early.Blob.String())
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.MkdirAll(filepath.Join(root, "state", "quarantine"), 0o700))
	require.NoError(t, os.WriteFile(path, []byte("damaged"), 0o444))
	fs, err := crashfs.New(root)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, fs.Close()) })
	s, err := dedupe.OpenRecipeStore(filepath.Join(root, "state"), fs)
	require.NoError(t, err)
	require.Len(t, s.Problems(), 1)
	requireRecipeStoreAfterCrash(t, fs, early.Blob, nil)
}

func TestRecipeStoreReturnsUsersOfABase(t *testing.T) {
	dir := memoryDir(t)
	s, err := dedupe.OpenRecipeStore(dir, nil)
	require.NoError(t, err)
	for _, r := range []*dedupe.Recipe{early, other} {
		require.NoError(t, s.Put(r, nil))
		p, ok := s.Has(r.Blob)
		require.True(t, ok)
		info, err := os.Stat(dedupe.RecipePath(dir, r.Blob))
		require.NoError(t, err)
		require.Equal(t, info.Size(), p.Stored)
		require.Equal(t, r.Size, p.Size)
		require.Equal(t, []int64{r.Size}, p.Taken)
	}
	for range 2 {
		require.ElementsMatch(t, []cas.Digest{early.Blob, other.Blob},
			s.Users(early.Bases[0].Digest))
		require.Empty(t, s.Users(early.Blob))
		var walked []cas.Digest
		require.NoError(t,
			s.Walk(context.Background(),
				func(d cas.Digest,
					_ dedupe.Packed) error {
					walked = append(walked, d)
					return nil
				}))
		require.Len(t, walked, 2)
		s, err = dedupe.OpenRecipeStore(dir, nil) // the same after a restart
		require.NoError(t, err)
	}
	err = s.Put(later, nil)
	require.NoError(t, err)
	require.Equal(t, []cas.Digest{other.Blob}, s.Users(early.Bases[0].Digest))
	require.Equal(t, []cas.Digest{early.Blob}, s.Users(later.Bases[0].Digest))
	require.NoError(t, s.Remove(other.Blob))
	require.Empty(t, s.Users(early.Bases[0].Digest))
	require.ErrorIs(t, s.Remove(other.Blob), cas.ErrNotFound)
}

// A file that is not at a recipe's path is neither moved nor removed, nor is what a link leads to.
func TestForeignFilesAmongTheRecipesStay(t *testing.T) {
	dir, elsewhere := memoryDir(t), t.TempDir()
	recipes, name := filepath.Join(dir, "recipes"), early.Blob.String()
	good, err := early.Encode()
	require.NoError(t, err)
	files := []string{filepath.Join(elsewhere, "precious"), filepath.Join(elsewhere, name),
		filepath.Join(recipes, "00", "x"), filepath.Join(recipes, "mine", "notes.txt")}
	for _, path := range files {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, good, 0o600))
	}
	for _, link := range []string{"link", name[:2]} {
		require.NoError(t, os.Symlink(elsewhere, filepath.Join(recipes, link)))
	}
	s, err := dedupe.OpenRecipeStore(dir, nil)
	require.NoError(t, err)
	require.Len(t, s.Problems(), 4)
	for _, p := range s.Problems() {
		require.True(t, p.Foreign, p.Path)
	}
	for _, path := range files {
		require.FileExists(t, path)
	}
	require.NoDirExists(t, filepath.Join(dir, "quarantine"))
}

// A recipe that is no good is put aside at the start; one of a newer version stays, and with it
// everything that it might need.
func TestRecipeStoreWithBadRecipes(t *testing.T) {
	good, err := early.Encode()
	require.NoError(t, err)
	newer := bytes.Clone(good)
	newer[8] = 3
	name := early.Blob.String()
	cases := map[string]struct {
		path  string
		bytes []byte
		want  string
		newer bool
	}{
		"flipped bit": {name[:2] + "/" + name,
			func() []byte { b := bytes.Clone(good); b[60] ^= 1; return b }(), "checksum", false},
		"cut off": {name[:2] + "/" + name, good[:len(good)-1], "offset 12: length",
			false},
		"empty": {name[:2] + "/" + name, nil, "offset 0: magic", false},
		"another blob's name": {other.Blob.String()[:2] + "/" + other.Blob.String(), good,
			"it is the recipe of " + name, false},
		"newer": {name[:2] + "/" + name, newer, "newer", true},
	}
	for what, c := range cases {
		t.Run(what, func(t *testing.T) {
			dir := memoryDir(t)
			path := filepath.Join(dir, "recipes", c.path)
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
			require.NoError(t, os.WriteFile(path, c.bytes, 0o444))
			s, err := dedupe.OpenRecipeStore(dir, nil)
			require.NoError(t, err)
			require.Len(t, s.Problems(), 1)
			require.Contains(t, s.Problems()[0].Detail, c.want)
			require.Equal(t, c.newer, s.Problems()[0].Newer)
			require.Equal(t, !c.newer, s.Complete())
			require.Equal(t, "recipes/"+c.path, s.Problems()[0].Path)
			if _, err := os.Stat(path); c.newer {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, os.ErrNotExist)
				aside, err := os.ReadDir(filepath.Join(dir, "quarantine"))
				require.NoError(t, err)
				require.Len(t, aside, 2, "the file, and a note why")
			}
		})
	}
}

// failsAt is a file system that gives neither the bytes of files nor descriptors of them, where it
// has errors for that.
type failsAt struct {
	cas.OS
	open, read error
}

func (f *failsAt) Open(path string) (*os.File, error) {
	if f.open != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: f.open}
	}
	return f.OS.Open(path)
}

func (f *failsAt) ReadAt(file *os.File, p []byte, off int64) (int, error) {
	if f.read != nil {
		return 0, &os.PathError{Op: "read", Path: file.Name(), Err: f.read}
	}
	return f.OS.ReadAt(file, p, off)
}

// An error of the system says nothing of a recipe: it stays, it may need anything until it is read,
// and it is tried again.
func TestRecipeStoreKeepsUnreadableRecipes(t *testing.T) {
	over := map[string]func(t *testing.T, s *dedupe.RecipeStore, fs *failsAt){
		"it is given later": func(t *testing.T, s *dedupe.RecipeStore, fs *failsAt) {
			*fs = failsAt{}
			s.RetryUnread()
			require.Equal(t, []cas.Digest{early.Blob}, s.Users(early.Bases[0].Digest))
		},
		"it is given to who uses it": func(t *testing.T, s *dedupe.RecipeStore, fs *failsAt) {
			*fs = failsAt{}
			require.True(t, s.HasOrRead(early.Blob))
			_, known := s.Has(early.Blob)
			require.True(t, known)
		},
		"another takes its place": func(t *testing.T, s *dedupe.RecipeStore, _ *failsAt) {
			err := s.Put(later, nil)
			require.NoError(t, err)
		},
		"it is put aside": func(t *testing.T, s *dedupe.RecipeStore, _ *failsAt) {
			require.NoError(t, s.Quarantine(early.Blob, "the disk does not give it"))
			require.False(t, s.HasOrRead(early.Blob))
		},
		"it is gone": func(t *testing.T, s *dedupe.RecipeStore, fs *failsAt) {
			*fs = failsAt{}
			require.NoError(t, s.Remove(early.Blob))
		},
	}
	for what, fails := range map[string]failsAt{"no bytes": {read: syscall.EIO},
		"no descriptor": {open: syscall.EMFILE}, "no memory": {read: syscall.ENOMEM}} {
		for how, end := range over {
			t.Run(what+", "+how, func(t *testing.T) {
				dir := memoryDir(t)
				s, err := dedupe.OpenRecipeStore(dir, nil)
				require.NoError(t, err)
				err = s.Put(early, nil)
				require.NoError(t, err)
				fs := fails
				s, err = dedupe.OpenRecipeStore(dir, &fs)
				require.NoError(t, err)
				require.Len(t, s.Problems(), 1)
				require.True(t, s.Problems()[0].Unread)
				require.False(t, s.Complete())
				require.FileExists(t, dedupe.RecipePath(dir, early.Blob))
				require.NoDirExists(t, filepath.Join(dir, "quarantine"))
				_, known := s.Has(early.Blob)
				require.False(t, known)
				require.True(t, s.HasOrRead(early.Blob))
				_, err = s.Get(early.Blob)
				require.ErrorIs(t, err, cmp.Or(fails.read, fails.open))
				end(t, s, &fs)
				require.True(t, s.Complete())
				require.Empty(t, s.Problems())
			})
		}
	}
}
