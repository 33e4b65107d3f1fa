package index

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas/crashfs"
	"github.com/epcached/epcached/index/journalfile"
)

// memoryDir makes a directory in memory, if that can be: hundreds of stores are
// made here, and power cuts are simulated anyway. Tests of free space use a disk.
func memoryDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "index")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

// outcome is what may be known of one build after a crash.
type outcome struct {
	build     Build
	there     bool   // has to be there
	absent    bool   // has to be gone; neither: may be there or not
	state     string // if it is there; "": any
	pinned    bool   // has to be
	tombstone bool   // has to have left one
}

// operation is one call of the index on a store with the build old, or several, of
// which the second lies in the directory of the first; new is not in it yet.
type operation struct {
	name  string
	run   func(x *Index, old, new Build) error
	done  func(old, new Build) []outcome // after it was acknowledged
	maybe func(old, new Build) []outcome // after it was not

	more int // builds besides old, which siblings gives
}

// siblings are builds besides another one, always the same.
func siblings(old Build, n int) (list []Build) {
	for i := range n {
		b := old
		b.ID[1], b.ID[0] = old.ID[1]+1, old.ID[0]+byte(i)
		b.ModelName = fmt.Sprintf("sibling %d", i)
		list = append(list, b)
	}
	return list
}

// together are old and two siblings.
func together(old Build, like outcome) (list []outcome) {
	for _, b := range append(siblings(old, 2), old) {
		like.build = b
		list = append(list, like)
	}
	return list
}

func errorsOf(list []*Change) (err error) {
	for _, c := range list {
		err = errors.Join(err, c.Err)
	}
	return err
}

var operations = []operation{
	{
		name: "publish",
		run:  func(x *Index, _, new Build) error { return x.Publish(ctx, new) },
		done: func(old, new Build) []outcome {
			return []outcome{{build: old, there: true}, {build: new, there: true}}
		},
		maybe: func(old,
			new Build) []outcome {
			return []outcome{{build: old, there: true}, {build: new}}
		},
	},
	{
		name: "retract",
		run:  func(x *Index, old, _ Build) error { return x.Retract(ctx, old.ID, "a test") },
		done: func(old, new Build) []outcome {
			return []outcome{{build: old, absent: true}, {build: new, absent: true}}
		},
		maybe: func(old,
			new Build) []outcome {
			return []outcome{{build: old}, {build: new, absent: true}}
		},
	},
	{
		name: "withhold",
		run: func(x *Index, old,
			_ Build) error {
			return x.Journal.SetState(old.ID, State{Name: Withheld})
		},
		done: func(old,
			_ Build) []outcome {
			return []outcome{{build: old, there: true, state: Withheld}}
		},
		maybe: func(old, _ Build) []outcome { return []outcome{{build: old, there: true}} },
	},
	{
		name: "withhold in a journal that is full",
		run: func(x *Index, old, _ Build) error {
			x.Journal.mu.Lock()
			x.Journal.limit = 0
			x.Journal.mu.Unlock()
			return x.Journal.SetState(old.ID, State{Name: Withheld})
		},
		done: func(old,
			_ Build) []outcome {
			return []outcome{{build: old, there: true, state: Withheld}}
		},
		maybe: func(old, _ Build) []outcome { return []outcome{{build: old, there: true}} },
	},
	{
		name: "pin",
		run:  func(x *Index, old, _ Build) error { return x.Journal.Pin(old.ID, Pin{UID: 7}) },
		done: func(old,
			_ Build) []outcome {
			return []outcome{{build: old, there: true, pinned: true}}
		},
		maybe: func(old, _ Build) []outcome { return []outcome{{build: old, there: true}} },
	},
	{
		name: "leave tombstones and go together",
		run: func(x *Index, old, _ Build) error {
			var list []*Change
			for _, b := range append(siblings(old, 2), old) {
				if _, err := x.Get(b.ID); err != nil { // gone in an earlier try
					continue
				}
				list = append(list, &Change{ID: b.ID, Why: "a test", Tombstone: &Tombstone{
					BuildID: b.ID, RequestKey: b.RequestKey, BuildKey: b.BuildKey,
					Reason: "a test"}})
			}
			x.Commit(list)
			return errorsOf(list)
		},
		done: func(old,
			_ Build) []outcome {
			return together(old, outcome{absent: true, tombstone: true})
		},
		maybe: func(old, _ Build) []outcome { return together(old, outcome{tombstone: true}) },
		more:  2,
	},
	{
		name: "publish and retract together",
		run: func(x *Index, old, new Build) error {
			var list []*Change
			if _, err := x.Get(new.ID); err != nil { // else an earlier try has done that
				c, err := x.Stage(ctx, new)
				if err != nil {
					return err
				}
				list = append(list, c)
			}
			if _, err := x.Get(old.ID); err == nil {
				list = append(list,
					&Change{ID: old.ID, Why: "a test", Tombstone: &Tombstone{BuildID: old.ID}})
			}
			x.Commit(list)
			return errorsOf(list)
		},
		done: func(old, new Build) []outcome {
			return []outcome{{build: old, absent: true, tombstone: true}, {build: new, there: true}}
		},
		maybe: func(old,
			new Build) []outcome {
			return []outcome{{build: old, tombstone: true}, {build: new}}
		},
	},
}

// requireIndex opens what a crash has left.
func requireIndex(t *testing.T, dir string, want []outcome) {
	t.Helper()
	x, err := Open(dir, Options{})
	require.NoError(t, err)
	for _, o := range want {
		got, err := x.Get(o.build.ID)
		switch {
		case o.there, !o.absent && err == nil:
			require.NoError(t, err)
			require.Equal(t, o.build, got)
			_, pinned := x.Journal.Pinned(o.build.ID)
			require.False(t, o.pinned && !pinned, "the pin is lost")
			if o.state != "" {
				require.Equal(t, o.state, x.Journal.StateOf(o.build.ID).Name)
			}
		default:
			require.ErrorIs(t, err, ErrNotFound)
		}
	}
	for _, o := range want {
		left := x.Journal.Tombstones(func(g *Tombstone) bool { return g.BuildID == o.build.ID })
		_, err := x.Get(o.build.ID)
		require.False(t, o.tombstone && err != nil && len(left) == 0,
			"gone, and no tombstone says why")
		require.False(t, err == nil && len(left) > 0, "the tombstone of a build that is there")
	}
	require.Empty(t, x.Problems())
	space, err := x.Space()
	require.NoError(t, err)
	n := uint64(0)
	require.NoError(t, x.Each(ctx, func(Build) error { n++; return nil }))
	require.Equal(t, n, space.Builds)
	closeSound(t, x)
}

func requireAfterCrash(t *testing.T, fs *crashfs.FS, want []outcome) {
	t.Helper()
	for _, loss := range []crashfs.Loss{crashfs.Nothing, crashfs.Everything, crashfs.Some} {
		after := memoryDir(t)
		require.NoError(t, fs.Crash(after, loss, uint64(fs.Steps()))) // another loss at each step
		requireIndex(t, filepath.Join(after, "state"), want)
		require.NoError(t, os.RemoveAll(after))
	}
}

// start makes an index with one build, and more besides, below a file system that can stop.
func start(t *testing.T, more int) (fs *crashfs.FS, x *Index, old Build) {
	t.Helper()
	root := memoryDir(t)
	dir := filepath.Join(root, "state")
	x, err := Open(dir, Options{})
	require.NoError(t, err)
	old = publish(t, x)
	for _, b := range siblings(old, more) {
		require.NoError(t, x.Publish(ctx, b))
	}
	require.NoError(t, x.Close())
	fs, err = crashfs.New(root)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, fs.Close()) })
	x, err = Open(dir, Options{FS: fs})
	require.NoError(t, err)
	t.Cleanup(func() { _ = x.Close() }) // of a store that has stopped
	return fs, x, old
}

func TestStopAtEveryStep(t *testing.T) {
	for _, op := range operations {
		t.Run(op.name, func(t *testing.T) {
			for step := 1; ; step += crashfs.Stride {
				fs, x, old := start(t, op.more)
				new := sampleBuild()
				before := fs.Steps()
				fs.StopAt(before + step)
				err := op.run(x, old, new)
				over := fs.Steps() < before+step // before the stop
				if err == nil {
					requireAfterCrash(t, fs, op.done(old, new))
				} else {
					requireAfterCrash(t, fs, op.maybe(old, new))
				}
				_ = x.Close() // it has stopped
				if over {
					require.NoError(t, err)
					require.Greater(t, step, 2, "the operation has no steps")
					return
				}
			}
		})
	}
}

func TestFailAtEveryStep(t *testing.T) {
	for _, op := range operations {
		t.Run(op.name, func(t *testing.T) {
			for step := 1; ; step += crashfs.Stride {
				fs, x, old := start(t, op.more)
				new := sampleBuild()
				before := fs.Steps()
				fs.FailAt(before+step, []error{syscall.EIO, syscall.ENOSPC}[step%2])
				err := op.run(x, old, new)
				over := fs.Steps() < before+step
				if err != nil {
					requireAfterCrash(t, fs, op.maybe(old, new))
					require.NoError(t, op.run(x, old, new), "tried again after step %d failed: %v",
						step, err)
				}
				requireAfterCrash(t, fs, op.done(old, new))
				require.NoError(t, x.Close())
				if over {
					return
				}
			}
		})
	}
}

func TestStopWhileOpening(t *testing.T) {
	for name, spoil := range map[string]func(dir string) error{
		"sound":   func(string) error { return nil },
		"missing": func(dir string) error { return os.Remove(filepath.Join(dir, "index.db")) },
		"marked as damaged": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "index.db.damaged"), []byte("a test"), 0o600)
		},
	} {
		t.Run("the database is "+name, func(t *testing.T) {
			for step := 1; ; step += crashfs.Stride {
				fs, x, old := start(t, 0)
				require.NoError(t, x.Journal.SetState(old.ID, State{Name: Withheld}))
				require.NoError(t, x.Close())
				dir := x.dir
				require.NoError(t, spoil(dir))
				// The journal ends within a record, so that it is rewritten.
				journal := filepath.Join(dir, "journal")
				b, err := os.ReadFile(journal)
				require.NoError(t, err)
				require.NoError(t, os.WriteFile(journal,
					append(b, journalfile.RecordMarker...), 0o600))
				fs.StopAt(fs.Steps() + step)
				x, err = Open(dir, Options{FS: fs})
				requireAfterCrash(t, fs, []outcome{{build: old, there: true, state: Withheld}})
				if err == nil {
					require.NoError(t, x.Close())
					return
				}
			}
		})
	}
}

// A process that gives its database up may be stopped at any step of that.
func TestStopWhileGivingTheDatabaseUp(t *testing.T) {
	for step := 1; ; step += crashfs.Stride {
		fs, x, old := start(t, 0)
		before := fs.Steps()
		fs.StopAt(before + step)
		broken := new(BrokenError)
		require.ErrorAs(t, x.db.fail(&panicError{cause: "a test"}), &broken)
		requireAfterCrash(t, fs, []outcome{{build: old, there: true}})
		_ = x.Close() // it has stopped
		if fs.Steps() < before+step {
			require.Greater(t, step, 2)
			return
		}
	}
}
