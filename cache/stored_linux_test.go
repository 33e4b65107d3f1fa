package cache

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/readonly"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/flock"
	"github.com/epcached/epcached/store"
)

// newStoppedStore returns the store of a stopped daemon, and the files that a request for the
// model of seed 1 got from it.
func newStoppedStore(t *testing.T, further ...func(b *bench)) (b *bench, r *request.Request,
	had map[string]string) {
	b = newBench(t)
	r = b.request(b.model(1))
	a := b.acquire(r)
	had = b.read(a)
	require.NoError(t, a.View.Close())
	for _, do := range further {
		do(b)
	}
	b.close()
	return b, r, had
}

func (b *bench) stored() *readonly.Store {
	b.Helper()
	s, err := readonly.Open(context.Background(), b.state, uint32(os.Getuid()))
	require.NoError(b, err)
	return s
}

func (b *bench) find(r *request.Request) *request.Answer {
	b.Helper()
	a, err := b.stored().Find(context.Background(), r, "")
	require.NoError(b, err)
	if a.View != nil {
		b.Cleanup(func() { a.View.Close() })
	}
	return a
}

func (b *bench) notFound(r *request.Request, build string) *apierr.Error {
	b.Helper()
	_, err := b.stored().Find(context.Background(), r, build)
	var e *apierr.Error
	require.ErrorAs(b, err, &e)
	require.Equal(b, apierr.NotFound, e.Class)
	return e
}

// listFiles lists the files of a directory: names, modes, sizes, times.
func listFiles(t *testing.T, dir string) (list []string) {
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		require.NoError(t, err)
		info, err := d.Info()
		require.NoError(t, err)
		list = append(list, fmt.Sprintln(path, info.Mode(), info.Size(), info.ModTime().UnixNano()))
		return nil
	}))
	return list
}

func TestAStoreIsReadWithoutADaemonAndWithoutATrace(t *testing.T) {
	b, r, had := newStoppedStore(t)
	for _, lost := range []string{"nothing", "index.db", "journal", "lock"} {
		if lost != "nothing" {
			require.NoError(t, os.Remove(filepath.Join(b.state, lost)))
		}
		before := listFiles(t, b.state)
		a := b.find(r)
		require.Equal(t, request.Hit, a.Outcome, "without %s", lost)
		require.Equal(t, had, b.read(a))
		require.Equal(t, compilers.Unknown, a.Compatibility.Verdict)
		require.Empty(t, a.Warnings)
		require.Equal(t, before, listFiles(t, b.state), "without %s", lost)
	}
}

func TestAStoredBuildOfTheCallersLibrariesIsOptimal(t *testing.T) {
	b, r, _ := newStoppedStore(t)
	r.Runtime.Directory = b.runtime
	a := b.find(r)
	require.Equal(t, compilers.Optimal, a.Compatibility.Verdict)
	require.Equal(t, judge.SourceLibrary, a.Compatibility.Source)
	b.library("2.0")
	require.Equal(t, compilers.Unknown, b.find(r).Compatibility.Verdict)
	r.Runtime.Directory = t.TempDir()
	_, err := b.stored().Find(context.Background(), r, "")
	require.Equal(t, apierr.Unavailable, apierr.ClassOf(err))
}

func TestStoredBuildsOfOtherRequestsAreNotFound(t *testing.T) {
	b, r, _ := newStoppedStore(t)
	graph := r.Graph
	for name, other := range map[string]func(*request.Request){
		"another model": func(r *request.Request) { r.Graph = b.model(2) },
		"another session option": func(r *request.Request) {
			r.SessionOptions = map[string]string{"session.disable_quant_qdq": "1"}
		},
		"another dimension": func(r *request.Request) {
			r.FreeDimensions = map[string]int64{"batch": 4}
		},
		"the other form": func(r *request.Request) { r.Embed = true },
		"another kind of device": func(r *request.Request) {
			r.EPs = []identity.EP{{Name: standin.EP, Devices: []compilers.Device{{Type: "GPU"}}}}
		},
		"another device": func(r *request.Request) {
			r.EPs = []identity.EP{{Name: standin.EP,
				Devices: []compilers.Device{{DeviceID: 0xbeef}}}}
		},
		"another provider": func(r *request.Request) {
			r.EPs = []identity.EP{{Name: "OtherExecutionProvider"}}
		},
		"one more provider": func(r *request.Request) {
			r.EPs = append(r.EPs,
				identity.EP{Name: "OtherExecutionProvider"})
		},
		"an option of the allowed": func(r *request.Request) {
			r.EPs = []identity.EP{{Name: standin.EP, Options: map[string]string{"what": "ever"}}}
		},
	} {
		one := *r
		one.EPs = []identity.EP{{Name: standin.EP}}
		one.Graph = graph
		other(&one)
		require.Contains(t, b.notFound(&one, "").Hint, "omit --state", name)
	}
	narrowed := b.notFound(r, "ffff")
	require.Contains(t, narrowed.Text, `no build of this model has the key prefix "ffff"`)
	require.Contains(t, narrowed.Hint, "without --build")
}

func TestADeviceFitsWithoutItsNumbers(t *testing.T) {
	b, r, _ := newStoppedStore(t)
	made, err := identity.Decode(b.find(r).Build.Record)
	require.NoError(t, err)
	device := compilers.Device(made.EPs[0].Devices[0])
	require.NotZero(t, device.Type)
	for _, asked := range []compilers.Device{{Type: device.Type}, {VendorID: device.VendorID},
		device} {
		r.EPs[0].Devices = []compilers.Device{asked}
		require.Equal(t, request.Hit, b.find(r).Outcome)
	}
}

func TestSeveralStoredBuildsAreNamed(t *testing.T) {
	b, r, had := newStoppedStore(t, func(b *bench) {
		b.library("2.0")
		b.policies = map[string]request.Policy{"": {Unknown: request.PolicyRefuse}}
		b.reopen()
		require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
	})
	e := b.notFound(r, "")
	require.Contains(t, e.Text, "2 different builds")
	require.Contains(t, e.Hint, "--build")
	both := b.stored().Builds
	require.Len(t, both, 2)
	for i := range both {
		require.Contains(t, e.Text, both[i].BuildKey.String()[:12])
		a, err := b.stored().Find(context.Background(), r, both[i].BuildKey.String()[:8])
		require.NoError(t, err)
		require.Equal(t, both[i].ID, a.Build.ID)
		require.NoError(t, a.View.Close())
	}
	b.library("1.0")
	r.Runtime.Directory = b.runtime
	require.Equal(t, had, b.read(b.find(r)), "the libraries decide which")
}

func TestAStoreThatADaemonHasIsRefused(t *testing.T) {
	b := newBench(t)
	_, err := readonly.Open(context.Background(), b.state, 0)
	var locked *store.LockedError
	require.ErrorAs(t, err, &locked)
	require.Equal(t, fmt.Sprintf("process %d", os.Getpid()), locked.Holder)
}

func TestStartKeepsUnpackedFilesInUse(t *testing.T) {
	b, r, _ := newStoppedStore(t)
	a, err := b.stored().Find(context.Background(), r, "")
	require.NoError(t, err)
	other, err := os.Open(a.Path)
	require.NoError(t, err)
	defer other.Close()
	held, err := flock.Leased(other) // as what removes views does
	require.NoError(t, err)
	require.True(t, held)
	require.NoError(t, a.View.Close())
	held, err = flock.Leased(other)
	require.NoError(t, err)
	require.False(t, held)
}

func TestStoredFilesAreHashed(t *testing.T) {
	b, r, _ := newStoppedStore(t)
	for _, f := range b.find(r).Build.Files {
		path := filepath.Join(b.state, "objects", f.Digest.String()[:2], f.Digest.String())
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.NoError(t, os.Chmod(path, 0o644))
		changed := append([]byte{}, data...)
		changed[len(changed)/2] ^= 1
		write := func(data []byte) {
			file, err := os.OpenFile(path, os.O_WRONLY, 0) // in place: the view has the same file
			require.NoError(t, err)
			_, err = file.Write(data)
			require.NoError(t, err)
			require.NoError(t, file.Close())
			require.NoError(t, os.Chtimes(path, info.ModTime(), info.ModTime()))
		}
		write(changed)
		_, err = b.stored().Find(context.Background(), r, "")
		var corrupt *cas.CorruptError
		require.ErrorAs(t, err, &corrupt)
		require.Equal(t, f.Digest, corrupt.Digest)
		write(data)
	}
	require.Equal(t, request.Hit, b.find(r).Outcome)
}

func TestAStoreWithoutViewsGivesItsBlobs(t *testing.T) {
	b, r, had := newStoppedStore(t)
	require.NoError(t,
		os.Rename(filepath.Join(b.state, "views"), filepath.Join(filepath.Dir(b.state), "gone")))
	s := b.stored()
	a, err := s.Find(context.Background(), r, "")
	require.NoError(t, err)
	require.Nil(t, a.View)
	require.Equal(t, had, b.readStored(s, a))
	require.NoError(t,
		s.Unpack(context.Background(), a, filepath.Join(t.TempDir(), "unpacked"), nil))
	defer a.View.Close()
	require.Equal(t, had, b.read(a))
	lost := a.Build.Files[0]
	name := lost.Digest.String()
	require.NoError(t, os.Remove(filepath.Join(b.state, "objects", name[:2], name)))
	require.Contains(t, b.notFound(r, "").Text, lost.Name+" is not in")
}

func TestWithheldStoredBuildsAreNotServed(t *testing.T) {
	b, r, _ := newStoppedStore(t, func(b *bench) {
		_, err := b.cache.Invalidate(context.Background(), request.Peer{UID: b.cache.uid},
			[]string{b.list()[0].Build.BuildKey.String()}, "it computes nonsense", false)
		require.NoError(t, err)
	})
	require.Contains(t, b.notFound(r, "").Text, "withheld: it computes nonsense")
	require.NoError(t,
		os.WriteFile(filepath.Join(b.state, "journal"), []byte("epcjrnal\x01"), 0o600))
	s := b.stored()
	require.Contains(t, fmt.Sprint(s.Problems()), "withheld builds may be served")
}

func TestStoredBuildOfAnotherUserIsNotServed(t *testing.T) {
	b := newBench(t)
	path := filepath.Join(t.TempDir(), "private.onnx")
	require.NoError(t, os.WriteFile(path, compilertest.Dense(1, 8, 1), 0o600))
	r := b.request(b.openFile(path))
	r.Peer.UID = 4711
	require.Equal(t, "uid:4711", b.acquire(r).Build.Scope)
	b.close()
	require.Contains(t, b.notFound(r, "").Text, "never compiled")
	s, err := readonly.Open(context.Background(), b.state, 4711)
	require.NoError(t, err)
	a, err := s.Find(context.Background(), r, "")
	require.NoError(t, err)
	require.NoError(t, a.View.Close())
}

func TestAStoredModelsExternalDataIsAskedFor(t *testing.T) {
	b := newBench(t)
	r := b.external(1, nil)
	had := b.read(b.acquire(r))
	b.close()
	files := r.External
	r.External = nil
	_, err := b.stored().Find(context.Background(), r, "")
	var need *identity.NeedFilesError
	require.ErrorAs(t, err, &need)
	require.Equal(t, []string{"weights.bin"}, need.Locations)
	r.External = files
	require.Equal(t, had, b.read(b.find(r)))
}

func TestADirectoryThatIsNoStore(t *testing.T) {
	_, err := readonly.Open(context.Background(), t.TempDir(), 0)
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
	require.ErrorContains(t, err, "it is not a store")
	_, err = readonly.Open(context.Background(), filepath.Join(t.TempDir(), "none"), 0)
	require.ErrorIs(t, err, fs.ErrNotExist)
}

// Without a daemon a graph is not loaded, so a later format than the runtime's is refused.
func TestAStoredGraphOfALaterONNXRuntimeIsNotFound(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	a := b.acquire(r)
	made := *a.Build
	made.ID[0] ^= 1
	made.IRVersion = 14
	b.publish(&made)
	names := []string{a.Build.ID.String()}
	_, err := b.cache.Remove(b.Context(), b.self(), names, false, false)
	require.NoError(t, err)
	b.close()
	r.Runtime.Directory = b.runtime
	require.Contains(t, b.notFound(r, "").Text, "IR version 14")
	r.Runtime.Directory = ""
	require.Equal(t, made.ID, b.find(r).Build.ID)
}
