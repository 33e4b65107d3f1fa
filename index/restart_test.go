package index

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

var ctx = context.Background()

func manifestFile(dir string, id BuildID) string {
	return filepath.Join(dir, "manifests", id.String()[:2], id.String())
}

func TestRetractedIsGoneAfterARestart(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	keep := publish(t, x)
	b := publish(t, x, func(b *Build) { b.Files[1].Digest = cas.Digest{3}; b.Files[1].Size = 50 })
	require.NoError(t, x.Journal.SetState(b.ID, State{Name: Withheld, Reason: "report"}))
	require.NoError(t, x.Retract(ctx, b.ID, "evicted to make room"))
	require.ErrorIs(t, x.Retract(ctx, b.ID, "again"), ErrNotFound)
	for range 2 {
		_, err := x.Get(b.ID)
		require.ErrorIs(t, err, ErrNotFound)
		builds, err := x.Lookup(b.RequestKey, "shared")
		require.NoError(t, err)
		require.Equal(t, []Build{keep}, builds)
		ids, err := x.Needs(cas.Digest{3})
		require.NoError(t, err)
		require.Empty(t, ids)
		space, err := x.Space()
		require.NoError(t, err)
		require.Equal(t, Space{6000, 6000, 1, 1, 12288, 4096}, space, "blobs in blocks of 4 KiB")
		require.Equal(t, State{Name: Current}, x.Journal.StateOf(b.ID))
		events := x.Journal.History(b.RequestKey)
		require.Len(t, events, 1)
		require.Equal(t, "retracted", events[0].Kind)
		require.Equal(t, "evicted to make room", events[0].Text)
		require.Equal(t, b.ID, events[0].BuildID)
		closeSound(t, x)
		x = open(t, dir)
	}
}

func TestLookup(t *testing.T) {
	x := open(t, memoryDir(t))
	early := publish(t, x, func(b *Build) { b.Created = b.Created.Add(-time.Hour) })
	late := publish(t, x)
	private := publish(t, x, func(b *Build) { b.Scope = "uid:100" })
	other := publish(t, x, func(b *Build) { b.RequestKey = RequestKey{8} })
	for name, c := range map[string]struct {
		key   RequestKey
		scope string
		want  []Build
	}{
		"newest first":          {late.RequestKey, "shared", []Build{late, early}},
		"a user's own":          {late.RequestKey, "uid:100", []Build{private}},
		"a longer user number":  {late.RequestKey, "uid:1000", nil},
		"another request":       {RequestKey{8}, "shared", []Build{other}},
		"a request never made":  {RequestKey{9}, "shared", nil},
		"a scope without build": {RequestKey{8}, "uid:100", nil},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 { // from the database, from memory
				got, err := x.Lookup(c.key, c.scope)
				require.NoError(t, err)
				require.Equal(t, c.want, got)
			}
		})
	}
	publishedAfterwards := publish(t, x, func(b *Build) { b.Created = b.Created.Add(time.Hour) })
	got, err := x.Lookup(late.RequestKey, "shared")
	require.NoError(t, err)
	require.Equal(t, []Build{publishedAfterwards, late, early}, got)
}

func TestEachGivesEveryBuildOnce(t *testing.T) {
	x := open(t, memoryDir(t))
	want := make(map[BuildID]bool)
	for range 70 {
		want[publish(t, x).ID] = true
	}
	got := make(map[BuildID]bool)
	require.NoError(t, x.Each(ctx, func(b Build) error {
		require.False(t, got[b.ID])
		got[b.ID] = true
		return nil
	}))
	require.Equal(t, want, got)
	stop := errors.New("enough")
	require.ErrorIs(t, x.Each(ctx, func(Build) error { return stop }), stop)
}

func TestPublishRefuses(t *testing.T) {
	x := open(t, memoryDir(t))
	there := publish(t, x)
	for name, change := range map[string]func(*Build){
		"no id":                func(b *Build) { b.ID = BuildID{} },
		"an id in use":         func(b *Build) { b.ID = there.ID },
		"no files":             func(b *Build) { b.Files = nil },
		"a graph of no file":   func(b *Build) { b.Graph = "other.onnx" },
		"a name that leaves":   func(b *Build) { b.Files[1].Name = "../a.bin" },
		"an absolute name":     func(b *Build) { b.Files[1].Name = "/a.bin" },
		"an unclean name":      func(b *Build) { b.Files[1].Name = "sub//a.bin" },
		"a name twice":         func(b *Build) { b.Files[1].Name = b.Files[0].Name },
		"a negative size":      func(b *Build) { b.Files[0].Size = -1 },
		"no scope":             func(b *Build) { b.Scope = "" },
		"a scope spelled else": func(b *Build) { b.Scope = "uid:007" },
		"text that is no text": func(b *Build) { b.ModelName = "\xff" },
	} {
		t.Run(name, func(t *testing.T) {
			b := sampleBuild()
			change(&b)
			require.Error(t, x.Publish(ctx, b))
			space, err := x.Space()
			require.NoError(t, err)
			require.Equal(t, uint64(1), space.Builds)
		})
	}
	closeSound(t, x)
}

func TestStates(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	b := publish(t, x)
	require.Equal(t, State{Name: Current}, x.Journal.StateOf(b.ID))
	want := State{Name: Damaged, Reason: "blob is damaged", At: time.Unix(5, 6).UTC()}
	require.NoError(t, x.Journal.SetState(b.ID, want))
	require.Equal(t, want, x.Journal.StateOf(b.ID))
	require.ErrorIs(t, x.Journal.SetState(BuildID{1}, State{Name: Withheld}), ErrNotFound)
	require.NoError(t, x.Close())
	require.NoError(t, os.Remove(filepath.Join(dir, "index.db"))) // the journal is the truth
	x = open(t, dir)
	require.Equal(t, want, x.Journal.StateOf(b.ID))
	require.NoError(t, x.Journal.SetState(b.ID, State{Name: Current}))
	closeSound(t, x)
	x = open(t, dir)
	require.Equal(t, State{Name: Current}, x.Journal.StateOf(b.ID))
	closeSound(t, x)
}

func TestSoftRowsSurviveARestart(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	b := publish(t, x)
	at := time.Unix(1_790_000_001, 0).UTC()
	stamp := cas.Stamp{Dev: 1, Ino: 2, Size: 3, Mtime: 4, Ctime: 5, Boot: "b"}
	x.Uses.Add(b.ID, at, 2, 1.5)
	x.Uses.Add(b.ID, at.Add(-time.Hour), 1, 0.5)
	x.Counters.Add("hits", 3)
	require.NoError(t, x.Memos.Save([]byte("key"), []byte("value")))
	require.NoError(t, x.Memos.Save([]byte("dropped"), nil))
	x.Memos.Drop([]byte("dropped"))
	require.NoError(t, x.Views.Save(b.ID[:], []byte("shared/x/1")))
	require.NoError(t, x.Stamps().SaveStamp(cas.Digest{1}, stamp))
	require.NoError(t, x.Stamps().SaveStamp(cas.Digest{2}, stamp))
	require.NoError(t, x.Stamps().ForgetStamp(cas.Digest{2}))
	require.ErrorIs(t, x.Memos.Save([]byte("huge"), make([]byte, maxCachedRow)), errRowTooLarge)
	for range 2 {
		require.Equal(t, Usage{Last: at, Hits: 3, SavedSeconds: 2}, x.Uses.usageOf(b.ID))
		last, hits := x.Uses.LastUse(b.ID)
		require.Equal(t, at, last)
		require.Equal(t, uint64(3), hits)
		require.Equal(t, map[string]uint64{"hits": 3}, x.Counters.All())
		v, ok := x.Memos.Get([]byte("key"))
		require.True(t, ok)
		require.Equal(t, "value", string(v))
		_, ok = x.Memos.Get([]byte("dropped"))
		require.False(t, ok)
		view, ok := x.Views.Get(b.ID[:])
		require.True(t, ok)
		require.Equal(t, "shared/x/1", string(view))
		got, ok := x.Stamps().LoadStamp(cas.Digest{1})
		require.True(t, ok)
		require.Equal(t, stamp, got)
		_, ok = x.Stamps().LoadStamp(cas.Digest{2})
		require.False(t, ok)
		closeSound(t, x)
		x = open(t, dir)
	}
	require.NoError(t, x.Retract(ctx, b.ID, "test"))
	_, ok := x.Views.Get(b.ID[:])
	require.False(t, ok)
	closeSound(t, x)
}

func TestOldMemosMakeRoom(t *testing.T) {
	var seconds atomic.Int64
	x, err := Open(memoryDir(t),
		Options{now: func() time.Time { return time.Unix(seconds.Load(), 0) }})
	require.NoError(t, err)
	defer func() { require.NoError(t, x.Close()) }()
	for i := range 30 {
		seconds.Add(1)
		require.NoError(t, x.Memos.Save([]byte{byte(i)}, []byte("v")))
	}
	require.NoError(t, x.rows.flush())
	require.NoError(t, x.Memos.trim(10))
	for i := range 30 {
		_, ok := x.Memos.Get([]byte{byte(i)})
		require.Equal(t, i >= 20, ok, "memo %d", i)
	}
}

// TestDatabaseIsRebuilt damages index.db in every way that is noticed at
// Open; the builds are there afterwards, and what was damaged is set aside.
func TestDatabaseIsRebuilt(t *testing.T) {
	truncate := func(n int64) func(string) error {
		return func(p string) error { return os.Truncate(p, n) }
	}
	for _, c := range []struct {
		name   string
		damage func(path string) error
		why    string
	}{
		{"missing", os.Remove, "it was missing"},
		{"empty", truncate(0), "it was empty"},
		{"half a page", truncate(2000), "invalid database"},
		{"two pages", truncate(8192), ""},
		{"rubbish",
			func(p string) error {
				return os.WriteFile(p, bytes.Repeat([]byte("rubbish "), 8192),
					0o600)
			}, "invalid database"},
		{"older schema", changeSchema(0), "its schema is 0"},
		{"newer schema", changeSchema(99), "its schema is 99"},
		{"bucket missing", func(p string) error {
			return inDatabase(p, func(tx *bbolt.Tx) error { return tx.DeleteBucket(bucketBlobs) })
		}, "it has no bucket blobs"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := memoryDir(t)
			x := open(t, dir)
			b := publish(t, x)
			require.NoError(t, x.Close())
			require.NoError(t, c.damage(filepath.Join(dir, "index.db")))
			x = open(t, dir)
			require.NotEmpty(t, x.Rebuilt())
			require.Contains(t, x.Rebuilt(), c.why)
			got, err := x.Lookup(b.RequestKey, b.Scope)
			require.NoError(t, err)
			require.Equal(t, []Build{b}, got)
			if c.name != "missing" {
				aside, err := filepath.Glob(filepath.Join(dir, "quarantine", "*-index.db"))
				require.NoError(t, err)
				require.Len(t, aside, 1)
			}
			closeSound(t, x)
			x = open(t, dir)
			require.Empty(t, x.Rebuilt())
			closeSound(t, x)
		})
	}
}

func inDatabase(path string, fn func(tx *bbolt.Tx) error) error {
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: time.Second})
	if err != nil {
		return err
	}
	return errors.Join(db.Update(fn), db.Close())
}

func changeSchema(version uint32) func(string) error {
	return func(path string) error {
		return inDatabase(path, func(tx *bbolt.Tx) error {
			return put(tx, bucketMeta, []byte("schema"),
				binary.LittleEndian.AppendUint32(nil, version))
		})
	}
}

// broken opens an index that reports when its database is damaged.
func broken(t *testing.T, dir string) (x *Index, reported chan *BrokenError) {
	t.Helper()
	reported = make(chan *BrokenError, 2)
	x, err := Open(dir, Options{OnBroken: func(err *BrokenError) { reported <- err }})
	require.NoError(t, err)
	t.Cleanup(func() { _ = x.Close() }) // it cannot be written to
	require.Empty(t, x.Rebuilt())
	return x, reported
}

// requireBroken requires that the database was given up, and that the next start makes it again.
func requireBroken(t *testing.T, x *Index, reported chan *BrokenError, cause string,
	builds ...Build) {
	t.Helper()
	require.Contains(t, (<-reported).Error(), cause)
	require.Empty(t, reported, "it is reported once")
	for _, b := range builds {
		_, err := x.Get(b.ID)
		require.ErrorAs(t, err, new(*BrokenError))
	}
	require.ErrorAs(t, x.Publish(ctx, sampleBuild()), new(*BrokenError))
	require.ErrorAs(t, x.Close(), new(*BrokenError))
	for range 2 {
		next := open(t, x.dir)
		require.Contains(t, next.Rebuilt(), cause)
		for _, b := range builds {
			got, err := next.Get(b.ID)
			require.NoError(t, err)
			require.Equal(t, b, got)
		}
		space, err := next.Space()
		require.NoError(t, err)
		require.EqualValues(t, len(builds), space.Builds)
		closeSound(t, next)
		cause = "" // the second start has a sound one
	}
	aside, err := filepath.Glob(filepath.Join(x.dir, "quarantine", "*-index.db"))
	require.NoError(t, err)
	require.Len(t, aside, 1)
	left, err := filepath.Glob(filepath.Join(x.dir, "index.db?*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// swapRecords gives a build the record of another one, as a flipped bit in a page can.
func swapRecords(dir string, a, b BuildID) error {
	return inDatabase(filepath.Join(dir, "index.db"), func(tx *bbolt.Tx) error {
		bucket := tx.Bucket(bucketBuilds)
		return bucket.Put(a[:], bytes.Clone(bucket.Get(b[:])))
	})
}

func TestARowOfAnotherKeyIsNotBelieved(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	a, b := publish(t, x), publish(t, x, func(b *Build) { b.RequestKey = RequestKey{5} })
	require.NoError(t, x.Close())
	require.NoError(t, swapRecords(dir, a.ID, b.ID))
	x, reported := broken(t, dir)
	_, err := x.Lookup(a.RequestKey, a.Scope)
	require.ErrorAs(t, err, new(*BrokenError))
	requireBroken(t, x, reported, "wrong checksum", a, b)
}

// Damage that a start meets in the database makes it rebuild the database at once.
func TestDamageFoundByAStartIsRepairedByIt(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	b := publish(t, x)
	x.Counters.Add("hits", 3)
	require.NoError(t, x.Close())
	require.NoError(t, inDatabase(filepath.Join(dir, "index.db"), func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketCounters).Put([]byte("hits"), make([]byte, sealSize+8))
	}))
	reported := false
	x, err := Open(dir, Options{OnBroken: func(*BrokenError) { reported = true }})
	require.NoError(t, err)
	require.Contains(t, x.Rebuilt(), "wrong checksum")
	require.False(t, reported, "it is of use")
	got, err := x.Get(b.ID)
	require.NoError(t, err)
	require.Equal(t, b, got)
	closeSound(t, x)
}

// noMark is a file system on which a damaged database cannot be marked.
type noMark struct{ cas.OS }

func (noMark) Create(path string) (*os.File, error) {
	if filepath.Base(path) == "index.db.damaged" {
		return nil, syscall.EROFS
	}
	return cas.OS{}.Create(path)
}

// A start that cannot repair the damage says what it is, and names the file in its log.
func TestAStartThatCannotMarkTheDamageNamesIt(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	x.Counters.Add("hits", 3)
	require.NoError(t, x.Close())
	require.NoError(t, inDatabase(filepath.Join(dir, "index.db"), func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketCounters).Put([]byte("hits"), make([]byte, sealSize+8))
	}))
	var log bytes.Buffer
	_, err := Open(dir, Options{FS: noMark{}, Log: slog.New(slog.NewTextHandler(&log, nil))})
	require.ErrorContains(t, err, "wrong checksum")
	require.Contains(t, log.String(), "remove it before the next start")
}

// TestTheFileIsCutShortInUse takes the pages away under the mapping: bbolt faults in the middle of
// a call, and may hold its locks from then on.
func TestTheFileIsCutShortInUse(t *testing.T) {
	for name, size := range map[string]int64{"all of it": 0, "all but the first pages": 8192} {
		for first, call := range map[string]func(x *Index, b Build) error{
			"read":  func(x *Index, b Build) error { _, err := x.Get(b.ID); return err },
			"write": func(x *Index, _ Build) error { return x.Publish(ctx, sampleBuild()) },
		} {
			t.Run(name+", found by a "+first, func(t *testing.T) {
				dir := memoryDir(t)
				var builds []Build
				x := open(t, dir)
				for i := range 40 {
					builds = append(builds,
						publish(t, x, func(b *Build) { b.RequestKey = RequestKey{byte(i)} }))
				}
				require.NoError(t, x.Close())
				x, reported := broken(t, dir)
				require.NoError(t, os.Truncate(filepath.Join(dir, "index.db"), size))
				require.ErrorAs(t, call(x, builds[0]), new(*BrokenError))
				requireBroken(t, x, reported, "fault", builds...)
			})
		}
	}
}

// A disk that is slow is no damage: however long a transaction takes, the database stays in use.
func TestASlowDatabaseIsNotDamaged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, err := Open(memoryDir(t), Options{OnBroken: func(err *BrokenError) { t.Error(err) }})
		require.NoError(t, err)
		b := publish(t, x)
		_, err = read(x.db, func(tx *bbolt.Tx) (Build, error) {
			time.Sleep(time.Hour)
			return readBuild(tx, b.ID)
		})
		require.NoError(t, err)
		_, err = x.Get(b.ID)
		require.NoError(t, err)
		require.NoError(t, x.Close())
	})
}

func TestASecondProcessIsRefused(t *testing.T) {
	dir := memoryDir(t)
	open(t, dir)
	_, err := Open(dir, Options{})
	require.ErrorContains(t, err, "in use by another process")
}

// TestOneBadManifest leaves the others alone, whether or not the database has
// to be made from them.
func TestOneBadManifest(t *testing.T) {
	edit := func(fn func(b []byte) []byte) func(string) error {
		return func(path string) error {
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			return os.WriteFile(path, fn(b), 0o600)
		}
	}
	for _, c := range []struct {
		name   string
		damage func(path string) error
		kind   string
	}{
		{"a flipped bit", edit(func(b []byte) []byte { b[40] ^= 1; return b }), "damaged"},
		{"cut short", edit(func(b []byte) []byte { return b[:len(b)-1] }), "damaged"},
		{"bytes appended", edit(func(b []byte) []byte { return append(b, 0) }), "damaged"},
		{"empty", edit(func([]byte) []byte { return nil }), "damaged"},
		{"wrong magic", edit(func(b []byte) []byte { b[0] = 'X'; return b }), "damaged"},
		{"version 0", edit(func(b []byte) []byte { b[8] = 0; return b }), "damaged"},
		{"of a newer epcached", edit(func(b []byte) []byte { b[8] = 2; return b }), "newer"},
		{"of another build", edit(func([]byte) []byte {
			b, err := encodeManifest(sampleBuild())
			if err != nil {
				panic(err)
			}
			return b
		}), "damaged"},
		{"no build in it", edit(func([]byte) []byte { return sealManifest(1, []byte{8, 1}) }),
			"damaged"},
		{"a length beyond all",
			edit(func(b []byte) []byte { return append(b[:12], 255, 255, 255, 255) }), "damaged"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := memoryDir(t)
			x := open(t, dir)
			good, bad := publish(t, x), publish(t, x)
			require.NoError(t, x.Close())
			path := manifestFile(dir, bad.ID)
			require.NoError(t, c.damage(path))
			require.NoError(t, os.Remove(filepath.Join(dir, "index.db")))
			x = open(t, dir)
			got, err := x.Lookup(good.RequestKey, good.Scope)
			require.NoError(t, err)
			require.Equal(t, []Build{good}, got)
			problems := x.Problems()
			require.Len(t, problems, 1)
			require.Equal(t, c.kind, problems[0].Kind)
			aside, err := filepath.Glob(filepath.Join(dir, "quarantine", "*-"+bad.ID.String()))
			require.NoError(t, err)
			if c.kind == "newer" {
				require.FileExists(t, path)
				require.Empty(t, aside)
				require.Contains(t, problems[0].Detail, "written by a newer epcached")
				return
			}
			require.NoFileExists(t, path)
			require.Len(t, aside, 1)
			require.FileExists(t, aside[0]+".txt")
		})
	}
}

// After a downgrade no start may remove the blobs of a build of a newer version as unreferenced,
// whatever else happens in its directory.
func TestABuildOfANewerEpcachedIsNotForgotten(t *testing.T) {
	dir := memoryDir(t)
	var later atomic.Int64
	now := func() time.Time { return time.Now().Add(time.Duration(later.Load())) }
	x, err := Open(dir, Options{now: now})
	require.NoError(t, err)
	require.True(t, x.Complete())
	b := publish(t, x)
	require.NoError(t, x.Close())
	file, err := os.ReadFile(manifestFile(dir, b.ID))
	require.NoError(t, err)
	file[8] = 2
	require.NoError(t, os.Remove(manifestFile(dir, b.ID)))
	putManifest(t, dir, b.ID, file)
	// a newer format comes with a newer schema
	require.NoError(t, os.Remove(filepath.Join(dir, "index.db")))
	for range 3 {
		x, err = Open(dir, Options{now: now})
		require.NoError(t, err)
		require.False(t, x.Complete())
		publish(t, x, func(other *Build) { other.ID[0] = b.ID[0] })
		later.Add(int64(2 * timeGranularity))
		require.NoError(t, x.Close())
	}
	file[8] = 1
	putManifest(t, dir, b.ID, file)
	x = open(t, dir)
	require.True(t, x.Complete())
	got, err := x.Get(b.ID)
	require.NoError(t, err)
	require.Equal(t, b, got)
	closeSound(t, x)
}

func TestADeletedManifestIsNoticed(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	keep, b := publish(t, x), publish(t, x)
	require.NoError(t, os.Remove(manifestFile(dir, b.ID)))
	found, err := x.Check(ctx, nil)
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.Equal(t, "missing", found[0].Kind)
	require.Equal(t, b.ID.String(), found[0].Object)
	require.NoError(t, x.Close())
	x = open(t, dir)
	require.Empty(t, x.Rebuilt(), "the directory was compared, not all of them")
	got, err := x.Lookup(keep.RequestKey, keep.Scope)
	require.NoError(t, err)
	require.Equal(t, []Build{keep}, got)
	closeSound(t, x)
}

// TestAnUnknownManifestIsTakenIn is what a crash between the manifest and the
// database leaves.
func TestAnUnknownManifestIsTakenIn(t *testing.T) {
	dir := memoryDir(t)
	require.NoError(t, open(t, dir).Close())
	b := sampleBuild()
	file, err := encodeManifest(b)
	require.NoError(t, err)
	putManifest(t, dir, b.ID, file)
	x := open(t, dir)
	require.Empty(t, x.Rebuilt())
	got, err := x.Get(b.ID)
	require.NoError(t, err)
	require.Equal(t, b, got)
	closeSound(t, x)
}

// TestQuietDirectoriesAreNotListed: a start must not depend on the number of builds.
func TestQuietDirectoriesAreNotListed(t *testing.T) {
	dir := memoryDir(t)
	var later atomic.Int64
	x, err := Open(dir,
		Options{now: func() time.Time { return time.Now().Add(time.Duration(later.Load())) }})
	require.NoError(t, err)
	b := publish(t, x)
	later.Store(int64(2 * timeGranularity)) // the times of the directories have settled
	require.NoError(t, x.Close())
	fs := &listed{}
	x, err = Open(dir, Options{FS: fs})
	require.NoError(t, err)
	require.Empty(t, fs.dirs)
	_, err = x.Get(b.ID)
	require.NoError(t, err)
	require.NoError(t, x.Close())
}

type listed struct {
	cas.OS
	dirs []string
}

func (l *listed) ReadDir(path string) ([]string, error) {
	if base := filepath.Base(path); len(base) == 2 {
		l.dirs = append(l.dirs, base)
	}
	return l.OS.ReadDir(path)
}

func TestHistoryIsCutOffNotLost(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	k := RequestKey{1}
	long := strings.Repeat("x", 2*maxText)
	for range 5 {
		require.NoError(t,
			x.Journal.AddEvent(ctx, Event{Kind: "failed", RequestKey: k, Text: long + "\xff"}))
	}
	require.NoError(t, x.Journal.AddEvent(ctx, Event{Kind: "failed", RequestKey: RequestKey{2}}))
	require.NoError(t, x.Close())
	x = open(t, dir)
	events := x.Journal.History(k)
	require.Len(t, events, 5)
	require.Len(t, events[0].Text, maxText)
	closeSound(t, x)
}

// While nothing can be written, values that may be lost are, and a job that is saved is not: it is
// acknowledged. Removals are kept.
func TestAFailureIsSavedThoughTooManyRowsArePending(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	gone := cas.Digest{7}
	require.NoError(t, x.Stamps().SaveStamp(gone, cas.Stamp{Ino: 2, Size: 3, Boot: "b"}))
	require.NoError(t, x.rows.flush())
	x.db.writing.Lock() // as long as the disk does not answer
	require.NoError(t, x.Stamps().ForgetStamp(gone))
	for i := range 2*maxPending + 5 {
		require.NoError(t, x.Memos.Save(binary.AppendUvarint(nil, uint64(i)), nil))
	}
	saved := make(chan error)
	go func() { saved <- x.Failures.SaveNow([]byte("job"), []byte("record")) }()
	x.db.writing.Unlock()
	require.NoError(t, <-saved)
	_, ok := x.Stamps().LoadStamp(gone)
	require.False(t, ok)
	wanted, err := x.Failures.All()
	require.NoError(t, err)
	require.Equal(t, map[string][]byte{"job": []byte("record")}, wanted)
	closeSound(t, x)
}

// A build whose use has to be read from a disk that does not answer delays no hit of another build.
func TestHitsAreCountedWhileAnotherUseIsRead(t *testing.T) {
	x := open(t, memoryDir(t))
	known, read := BuildID{1}, BuildID{2}
	x.Uses.Add(known, time.Now(), 1, 0)
	x.rows.mu.Lock() // as long as the disk does not answer
	begun, counted := make(chan bool), make(chan bool)
	go func() {
		close(begun)
		x.Uses.Add(read, time.Now(), 1, 0)
		close(counted)
	}()
	<-begun
	free := true
	for range 100 {
		if free = free && x.Uses.mu.TryLock(); free {
			x.Uses.mu.Unlock()
			time.Sleep(time.Millisecond)
		}
	}
	x.rows.mu.Unlock()
	<-counted
	require.True(t, free, "the lock is held while a row is read")
	_, hits := x.Uses.LastUse(read)
	require.EqualValues(t, 1, hits)
	closeSound(t, x)
}

// A value that is dropped as soon as it can be read stays away, also if its durable save has not
// returned by then.
func TestDroppedMemoIsNotSavedAgain(t *testing.T) {
	x := open(t, memoryDir(t))
	for i := range 300 {
		key := binary.AppendUvarint([]byte("memo"), uint64(i))
		saved := make(chan error)
		go func() { saved <- x.Memos.SaveNow(key, []byte("value")) }()
		require.Eventually(t, func() bool { _, ok := x.Memos.Get(key); return ok },
			time.Minute, time.Microsecond)
		x.Memos.Drop(key)
		require.NoError(t, x.rows.flush())
		require.NoError(t, <-saved)
		require.NoError(t, x.rows.flush())
		_, ok := x.Memos.Get(key)
		require.False(t, ok, "round %d", i)
	}
	closeSound(t, x)
}
