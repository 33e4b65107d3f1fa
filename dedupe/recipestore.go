package dedupe

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"github.com/epcached/epcached/cas"
)

// RecipeStore stores recipes, in the directory recipes below the state directory, and knows their
// bases. A recipe's name is the digest of its blob. RecipeStore never removes or reads a blob: the
// caller must keep each base for which Users returns a blob.
//
// Put and Remove return when the change is durable; a crash at any step leaves the earlier recipe
// or the new one, complete, and at most a staged file, which the next OpenRecipeStore removes. A
// RecipeStore is safe for concurrent use.
type RecipeStore struct {
	dir      string // the state directory
	recipes  string
	incoming string // directory of staged recipes
	fs       cas.FS
	onlyRead bool // recipes are read only when they are requested

	writing sync.Mutex // held during a change on disk and the update of the maps

	mu     sync.RWMutex                           // guards the fields below
	packed map[cas.Digest]Packed                  // by blob
	users  map[cas.Digest]map[cas.Digest]struct{} // base -> blobs with recipes that need it
	// removing has the bases of removed recipes that may come back after a crash, so that they
	// still count as users.
	removing map[cas.Digest][]Base
	unread   map[cas.Digest]Problem // unreadable recipes, whose bases are unknown
	problems []Problem
}

// Packed has the facts about a recipe that are kept in memory.
type Packed struct {
	Size   int64 // bytes of the restored blob
	Stored int64 // bytes of the recipe's file
	Disk   int64 // disk bytes of the file, in whole blocks
	Own    int64 // bytes of the literals
	Bases  []Base
	// Taken has the bytes of the blob from each base, then from literals in the file.
	Taken    []int64
	Literals int // as in Recipe
}

// Problem is a recipe that could not be read when the recipe store was opened. It was moved to
// quarantine, unless one of the flags is set.
type Problem struct {
	Path  string // below the state directory
	Newer bool   // written by a newer epcached
	// Foreign: not a recipe's path, so the file is neither read nor moved.
	Foreign bool
	// Unread: an error of the system prevented reading it. HasOrRead retries.
	Unread bool
	Detail string
}

const (
	recipesName  = "recipes"
	incomingName = "incoming" // below recipes, so that renames stay on one file system
)

// OpenRecipeStore opens the recipes in the state directory dir. If fsys is nil it uses the
// operating system's file system. It moves damaged recipes to quarantine, and leaves those that the
// system fails to read; Problems returns both. No other process may use the directory at the same
// time.
func OpenRecipeStore(dir string, fsys cas.FS) (*RecipeStore, error) {
	s := &RecipeStore{dir: dir, recipes: filepath.Join(dir, recipesName),
		incoming: filepath.Join(dir, recipesName, incomingName),
		fs:       cmp.Or[cas.FS](fsys, cas.OS{}),
		packed:   make(map[cas.Digest]Packed), users: make(map[cas.Digest]map[cas.Digest]struct{}),
		removing: make(map[cas.Digest][]Base), unread: make(map[cas.Digest]Problem)}
	if err := s.open(); err != nil {
		return nil, fmt.Errorf("open recipes %s: %w", s.recipes, err)
	}
	return s, nil
}

// ReadRecipeStore returns a RecipeStore for reading only. It reads recipes when they are requested,
// writes no file and takes no lock, so that it works on a read-only file system. Of the methods
// that answer from memory, only HasOrRead works.
func ReadRecipeStore(dir string) *RecipeStore {
	return &RecipeStore{dir: dir, recipes: filepath.Join(dir, recipesName), fs: cas.OS{},
		onlyRead: true}
}

func (s *RecipeStore) open() error {
	for _, path := range []string{s.recipes, s.incoming} {
		if err := s.fs.Mkdir(path); err != nil {
			return err
		}
	}
	if err := s.fs.SyncDir(s.dir); err != nil {
		return err
	}
	if err := cas.RemoveLeftovers(s.fs, s.incoming); err != nil {
		return err
	}
	dirs, err := s.fs.ReadDir(s.recipes)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if dir == incomingName {
			continue
		}
		err := s.openDir(dir)
		if errors.Is(err, syscall.ENOTDIR) {
			s.problems = append(s.problems, Problem{Path: filepath.Join(recipesName, dir),
				Foreign: true, Detail: "it is not a directory of recipes"})
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// openDir reads a directory of recipes. It fails with ENOTDIR for a link or another foreign name.
func (s *RecipeStore) openDir(dir string) error {
	if cas.ParseHex("directory", dir, make([]byte, 1)) != nil {
		return syscall.ENOTDIR
	}
	names, err := s.fs.ReadDir(filepath.Join(s.recipes, dir))
	if err != nil {
		return err
	}
	damaged := false
	for _, name := range names {
		path := filepath.Join(dir, name)
		d, err := digestOf(path)
		foreign := err != nil
		if !foreign {
			err = s.loadRecipe(d)
		}
		if err == nil {
			continue
		}
		p := Problem{Foreign: foreign, Path: filepath.Join(recipesName, path),
			Newer: errors.Is(err, ErrNewer), Detail: err.Error()}
		// An error of the system, such as a lack of memory or a temporary failure of the disk, does
		// not mean that the recipe is damaged.
		noGood := cas.IsUnsound(err) && !errors.Is(err, syscall.EIO)
		p.Unread = !p.Newer && !noGood && !errors.As(err, new(*FormatError))
		s.problems = append(s.problems, p)
		if p.Newer || p.Unread {
			s.unread[d] = p
		} else if !foreign {
			if err := cas.SetAside(s.fs, s.dir, filepath.Join(s.recipes, path),
				err.Error()); err != nil {
				return err
			}
			damaged = true
		}
	}
	if damaged {
		return s.fs.SyncDir(filepath.Join(s.recipes, dir))
	}
	return nil
}

func digestOf(path string) (cas.Digest, error) {
	d, err := cas.ParseDigest(filepath.Base(path))
	if err != nil {
		return d, &FormatError{-1, "name", err.Error()}
	}
	if filepath.Dir(path) != d.String()[:2] {
		return d, &FormatError{-1, "name", "it is in the wrong directory"}
	}
	return d, nil
}

func (s *RecipeStore) loadRecipe(d cas.Digest) error {
	r, stamp, err := readRecipe(s.fs, s.path(d), d)
	if err != nil {
		return err
	}
	s.noteRecipe(r, stamp.Size, true)
	return nil
}

func (s *RecipeStore) directory(d cas.Digest) string { return recipeDir(s.dir, d) }
func (s *RecipeStore) path(d cas.Digest) string      { return RecipePath(s.dir, d) }

// RecipePath returns the path of a blob's recipe in the state directory dir.
func RecipePath(dir string, d cas.Digest) string {
	return filepath.Join(recipeDir(dir, d), d.String())
}

func recipeDir(dir string, d cas.Digest) string {
	return filepath.Join(dir, recipesName, d.String()[:2])
}

// noteRecipe records a recipe. With certain no earlier one can come back after a crash, so their
// bases are released.
func (s *RecipeStore) noteRecipe(r *Recipe, stored int64, certain bool) {
	p := Packed{Size: r.Size, Stored: stored, Bases: slices.Clone(r.Bases),
		Taken: r.BytesPerBase(), Literals: r.Literals}
	if r.Frames != nil {
		p.Own = r.Frames.size
	} else if r.Literals != NoLiterals {
		p.Own = r.Bases[r.Literals].Size
	}
	p.Disk, _ = cas.DiskBytes(s.path(r.Blob)) // 0 if it was just removed
	s.mu.Lock()
	defer s.mu.Unlock()
	if certain {
		s.forgetLocked(r.Blob)
	} else if was, ok := s.packed[r.Blob]; ok {
		s.removing[r.Blob] = append(s.removing[r.Blob], was.Bases...)
	}
	s.packed[r.Blob] = p
	for _, c := range r.Bases {
		if s.users[c.Digest] == nil {
			s.users[c.Digest] = make(map[cas.Digest]struct{})
		}
		s.users[c.Digest][r.Blob] = struct{}{}
	}
}

// forgetLocked releases the bases of a blob's recipe and of its removed recipes.
func (s *RecipeStore) forgetLocked(d cas.Digest) {
	s.releaseBasesLocked(d, s.packed[d].Bases)
	delete(s.packed, d)
	s.releaseBasesLocked(d, s.removing[d])
	delete(s.removing, d)
	if was, ok := s.unread[d]; ok {
		delete(s.unread, d)
		s.problems = slices.DeleteFunc(s.problems, func(p Problem) bool { return p == was })
	}
}

func (s *RecipeStore) releaseBasesLocked(d cas.Digest, bases []Base) {
	for _, c := range bases {
		if delete(s.users[c.Digest], d); len(s.users[c.Digest]) == 0 {
			delete(s.users, c.Digest)
		}
	}
}

// Put stores the recipe durably, and replaces an earlier one of the blob. verify, which may be nil,
// is called with the written recipe before it gets its name; if it fails, the store is unchanged.
// The bases must be durable before. After Put, Users returns the blob for each of them.
func (s *RecipeStore) Put(r *Recipe, verify func(*Recipe) error) error {
	b, err := r.Encode()
	var path string
	if err == nil {
		// without the lock, so that others can put and remove
		path, err = s.stage(r.Blob, b, verify)
	}
	if err == nil {
		err = s.rename(r, path, int64(len(b)))
	}
	if err != nil {
		return fmt.Errorf("store the recipe of blob %s: %w", r.Blob, err)
	}
	return nil
}

func (s *RecipeStore) stage(d cas.Digest, b []byte, verify func(*Recipe) error) (path string,
	err error) {
	path = filepath.Join(s.incoming, rand.Text())
	f, err := s.fs.Create(path)
	if err != nil {
		return "", err
	}
	if _, err = s.fs.WriteAt(f, b, 0); err == nil {
		err = s.fs.Chmod(f, 0o444)
	}
	if err == nil {
		err = s.fs.Sync(f)
	}
	err = errors.Join(err, f.Close())
	if err == nil && verify != nil {
		var written *Recipe
		if written, _, err = readRecipe(s.fs, path, d); err == nil {
			err = verify(written)
		}
	}
	if err != nil {
		return "", errors.Join(err, s.fs.Remove(path))
	}
	return path, nil
}

// rename moves the staged recipe to its name, durably. After an error a crash may bring the earlier
// recipe back.
func (s *RecipeStore) rename(r *Recipe, path string, stored int64) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	// made with its first recipe, because most stores have few
	err := s.fs.Mkdir(s.directory(r.Blob))
	if err == nil {
		err = s.fs.SyncDir(s.recipes)
	}
	if err == nil {
		// Visible from here on; a crash before this line leaves only the staged file.
		err = s.fs.Rename(path, s.path(r.Blob))
	}
	if err != nil {
		return errors.Join(err, s.fs.Remove(path))
	}
	err = s.fs.SyncDir(s.directory(r.Blob))
	s.noteRecipe(r, stored, err == nil)
	return err
}

// Get reads a blob's recipe. Errors are cas.ErrNotFound, *FormatError, ErrNewer, or the system's.
func (s *RecipeStore) Get(d cas.Digest) (*Recipe, error) {
	r, _, err := s.GetStamped(d)
	return r, err
}

// GetStamped is Get, and also returns the stamp of the file that was read, so that a caller that
// has verified the recipe can check whether the file is still the same.
func (s *RecipeStore) GetStamped(d cas.Digest) (*Recipe, cas.Stamp, error) {
	r, stamp, err := readRecipe(s.fs, s.path(d), d)
	if err != nil {
		return nil, cas.Stamp{}, fmt.Errorf("recipe of blob %s: %w", d, err)
	}
	return r, stamp, nil
}

// Has reports whether a blob has a recipe, from memory.
func (s *RecipeStore) Has(d cas.Digest) (Packed, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	p, ok := s.packed[d]
	return p, ok
}

// HasOrRead is Has, but first retries reading a recipe that could not be read at opening.
func (s *RecipeStore) HasOrRead(d cas.Digest) bool {
	if s.onlyRead {
		_, err := s.Get(d)
		return !errors.Is(err, cas.ErrNotFound)
	}
	s.mu.RLock()
	_, known := s.packed[d]
	_, unread := s.unread[d]
	s.mu.RUnlock()
	if known || !unread {
		return known
	}
	s.writing.Lock()
	defer s.writing.Unlock()
	if _, known := s.Has(d); known {
		return true // another caller has read it
	}
	return !errors.Is(s.loadRecipe(d), cas.ErrNotFound)
}

// RetryUnread retries reading the recipes that could not be read when the recipe store was opened.
func (s *RecipeStore) RetryUnread() {
	var again []cas.Digest
	s.mu.RLock()
	for d, p := range s.unread {
		if p.Unread {
			again = append(again, d)
		}
	}
	s.mu.RUnlock()
	for _, d := range again {
		_ = s.HasOrRead(d) // failures stay in Problems
	}
}

// Users returns the blobs with recipes that need a base, in order of digests.
func (s *RecipeStore) Users(base cas.Digest) []cas.Digest {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.SortedFunc(maps.Keys(s.users[base]), cas.Digest.Compare)
}

// Bases returns every base that a recipe needs, in order of digests.
func (s *RecipeStore) Bases() []cas.Digest {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.SortedFunc(maps.Keys(s.users), cas.Digest.Compare)
}

// Walk calls fn with every recipe that existed when it began, in order of digests, and stops at
// fn's first error.
func (s *RecipeStore) Walk(ctx context.Context, fn func(cas.Digest, Packed) error) error {
	s.mu.RLock()
	all := slices.SortedFunc(maps.Keys(s.packed), cas.Digest.Compare)
	s.mu.RUnlock()
	for _, d := range all {
		if err := ctx.Err(); err != nil {
			return err
		}
		if p, ok := s.Has(d); ok {
			if err := fn(d, p); err != nil {
				return err
			}
		}
	}
	return nil
}

// Complete reports whether every recipe could be read. While one could not, its bases are
// unknown, so no blob may be removed as unreferenced.
func (s *RecipeStore) Complete() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return len(s.unread) == 0
}

// Problems returns the problems from opening that still exist.
func (s *RecipeStore) Problems() []Problem {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.Clone(s.problems)
}
