package index

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas/crashfs"
)

// memoryDir makes a folder in memory, if that can be: hundreds of stores are
// made here, and what a power cut takes away is simulated anyway.
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
	build  Build
	there  bool   // has to be there
	absent bool   // has to be gone; neither: may be there or not
	state  string // if it is there; "": any
	pinned bool   // has to be
	ghost  bool   // has to have left one
}

// operation is one call of the index on a store with the build old; new is
// not in it yet.
type operation struct {
	name  string
	run   func(x *Index, old, new Build) error
	done  func(old, new Build) []outcome // after it was acknowledged
	maybe func(old, new Build) []outcome // after it was not
}

var operations = []operation{
	{
		"publish",
		func(x *Index, _, new Build) error { return x.Publish(ctx, new) },
		func(old, new Build) []outcome {
			return []outcome{{build: old, there: true}, {build: new, there: true}}
		},
		func(old, new Build) []outcome { return []outcome{{build: old, there: true}, {build: new}} },
	},
	{
		"retract",
		func(x *Index, old, _ Build) error { return x.Retract(ctx, old.ID, "a test") },
		func(old, new Build) []outcome {
			return []outcome{{build: old, absent: true}, {build: new, absent: true}}
		},
		func(old, new Build) []outcome { return []outcome{{build: old}, {build: new, absent: true}} },
	},
	{
		"withhold",
		func(x *Index, old, _ Build) error { return x.SetState(old.ID, State{Name: Withheld}) },
		func(old, _ Build) []outcome { return []outcome{{build: old, there: true, state: Withheld}} },
		func(old, _ Build) []outcome { return []outcome{{build: old, there: true}} },
	},
	{
		"withhold in a journal that is full",
		func(x *Index, old, _ Build) error {
			x.journal.mu.Lock()
			x.journal.limit = 0
			x.journal.mu.Unlock()
			return x.SetState(old.ID, State{Name: Withheld})
		},
		func(old, _ Build) []outcome { return []outcome{{build: old, there: true, state: Withheld}} },
		func(old, _ Build) []outcome { return []outcome{{build: old, there: true}} },
	},
	{
		"pin",
		func(x *Index, old, _ Build) error { return x.Pin(old.ID, Pin{UID: 7}) },
		func(old, _ Build) []outcome { return []outcome{{build: old, there: true, pinned: true}} },
		func(old, _ Build) []outcome { return []outcome{{build: old, there: true}} },
	},
	{
		"leave a ghost and go",
		func(x *Index, old, _ Build) error {
			if _, err := x.Get(old.ID); err == nil { // not gone in an earlier try
				if err := x.Haunt(ctx, []Ghost{{BuildID: old.ID, RequestKey: old.RequestKey, BuildKey: old.BuildKey, Reason: "a test"}}); err != nil {
					return err
				}
			}
			return x.Retract(ctx, old.ID, "a test")
		},
		func(old, _ Build) []outcome { return []outcome{{build: old, absent: true, ghost: true}} },
		func(old, _ Build) []outcome { return []outcome{{build: old, ghost: true}} }, // which counts where the build is gone
	},
	{
		"make the database anew",
		func(x *Index, _, _ Build) error {
			return x.db.replace(x.db.handle, &faultError{"a test"})
		},
		func(old, _ Build) []outcome { return []outcome{{build: old, there: true}} },
		func(old, _ Build) []outcome { return []outcome{{build: old, there: true}} },
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
			_, pinned := x.Pinned(o.build.ID)
			require.False(t, o.pinned && !pinned, "the pin is lost")
			if o.state != "" {
				require.Equal(t, o.state, x.StateOf(o.build.ID).Name)
			}
		default:
			require.ErrorIs(t, err, ErrNotFound)
		}
	}
	for _, o := range want {
		left := x.Ghosts(func(g *Ghost) bool { return g.BuildID == o.build.ID })
		_, err := x.Get(o.build.ID)
		require.False(t, o.ghost && err != nil && len(left) == 0, "gone, and no ghost says why")
		require.False(t, err == nil && len(left) > 0, "the ghost of a build that is there")
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

// start makes an index with one build, below a file system that can stop.
func start(t *testing.T) (fs *crashfs.FS, x *Index, old Build) {
	t.Helper()
	root := memoryDir(t)
	dir := filepath.Join(root, "state")
	x, err := Open(dir, Options{})
	require.NoError(t, err)
	old = publish(t, x)
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
				fs, x, old := start(t)
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
				fs, x, old := start(t)
				new := sampleBuild()
				before := fs.Steps()
				fs.FailAt(before+step, []error{syscall.EIO, syscall.ENOSPC}[step%2])
				err := op.run(x, old, new)
				over := fs.Steps() < before+step
				if err != nil {
					requireAfterCrash(t, fs, op.maybe(old, new))
					require.NoError(t, op.run(x, old, new), "tried again after step %d failed: %v", step, err)
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
	for _, lost := range []string{"nothing", "index.db"} {
		t.Run(fmt.Sprintf("%s is missing", lost), func(t *testing.T) {
			for step := 1; ; step += crashfs.Stride {
				fs, x, old := start(t)
				require.NoError(t, x.SetState(old.ID, State{Name: Withheld}))
				require.NoError(t, x.Close())
				dir := x.dir
				if lost != "nothing" {
					require.NoError(t, os.Remove(filepath.Join(dir, lost)))
				}
				// The journal ends within a record, so that it is written anew.
				journal := filepath.Join(dir, "journal")
				b, err := os.ReadFile(journal)
				require.NoError(t, err)
				require.NoError(t, os.WriteFile(journal, append(b, recordMarker...), 0o600))
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
