package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// stress is a hundred applications of a few users at one daemon, whose budget is too small for
// their builds. They compile by themselves, with OpenVINO, and put the results, so that no request
// waits for a worker and the store gets all the load.
type stress struct {
	*epcached
	users  []stressUser
	models [][]*stressModel // by user
	kept   sync.Map         // what was acknowledged, by build key
	tally  tally
}

// stressUser is a user that applications run as.
type stressUser struct {
	*owner
	library *os.File // its execution provider's, open
}

// stressModel is a model, and what the first of its applications that got a claim has made of it.
type stressModel struct {
	path  string
	file  *os.File
	once  sync.Once
	put   *wire.Put
	files []*os.File
}

const (
	stressClients = 100
	stressModels  = 2 // of each user
)

// A hundred applications acquire, put, give up, die and release at random, for
// EPCACHED_STRESS_SECONDS, under a budget for a third of their builds, while an administrator
// collects, and in a run of more than half a minute packs and unpacks. The budget is exceeded by
// one artefact at most. No application loses a file of a view that it holds. Each acknowledged
// build is there, or its eviction is reported. At the end neither this daemon nor the next one
// finds an inconsistency.
func TestAHundredApplicationsUnderATightBudget(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: only root can connect as other users")
	}
	random := seeded(t)
	seconds := number(t, "EPCACHED_STRESS_SECONDS", 6)
	users, pack := 10, "off"
	if seconds > 30 {
		users, pack = 25, "always" // each may have one claim a second in the long run
	}
	s, largest := newStress(t, users)
	budget := largest * int64(users*stressModels) / 3
	s.config = fmt.Sprintf("worker = %q\n", filepath.Join(programs, "epcached-ort")) + unmeasured +
		fmt.Sprintf("[space]\nbudget = \"%d\"\npack = %q\n", budget, pack)
	s.epcached = s.startControlled(t)
	for _, u := range s.users {
		u.epcached = s.epcached
	}

	ctx, over := context.WithCancel(context.Background())
	defer over()
	end := time.Now().Add(time.Duration(seconds) * time.Second)
	var group errgroup.Group
	for i := range stressClients {
		own := rand.New(rand.NewPCG(random.Uint64(), uint64(i)))
		group.Go(func() error { return s.application(ctx, own, i%users) })
	}
	group.Go(func() error {
		return s.administrator(ctx, rand.New(rand.NewPCG(random.Uint64(), 0)),
			pack == "always")
	})
	watcher := s.dial()
	var worst, told int64
	var where, tellsOf string
	for ctx.Err() == nil {
		status, err := unixsock.Ask[wire.StatusReply](limited(t), watcher, &wire.Status{}, nil)
		require.NoError(t, err)
		sp := status.Space
		// a busy machine takes longer to fill the budget
		if now := time.Now(); now.After(end) && (sp.Evicted > 0 || now.After(end.Add(patience))) {
			over()
		}
		parts := fmt.Sprintf("%d of builds, %d of copies, %d of manifests, %d held, %d set aside",
			sp.DiskBytes, sp.UnpackedBytes, sp.ManifestBytes, sp.HeldBytes, sp.ReservedBytes)
		now, in := s.onDisk()
		if now > worst {
			worst, where = now, in+", just before "+parts
		}
		if sum := sp.DiskBytes + sp.UnpackedBytes + sp.ManifestBytes + sp.HeldBytes; sum > told {
			told, tellsOf = sum, fmt.Sprintf("%s, just before %d on disk: %s", parts, now, in)
		}
		time.Sleep(5 * time.Millisecond)
	}
	require.NoError(t, group.Wait())

	status, err := unixsock.Ask[wire.StatusReply](limited(t), watcher, &wire.Status{}, nil)
	require.NoError(t, err)
	s.requireToldOf(watcher)
	requireNothingFound(t, watcher)
	s.stop()
	t.Logf(
		"%s; %d evicted; at most %d on disk (%d accounted for) of %d bytes, an artefact takes %d",
		s.tally.String(), status.Space.Evicted, worst, told, budget, largest)
	t.Logf("the most on disk: %s", where)
	t.Logf("the most accounted for: %s", tellsOf)
	s.tally.explain(t)
	require.Positive(t, status.Space.Evicted)
	require.LessOrEqual(t, worst, budget+largest, "the budget, and one artefact in flight")
	require.LessOrEqual(t, told, budget+largest)
	requireNothingFound(t, s.start(t).dial())
}

// newStress makes the models, and has one of each compiled to see how large artefacts are: in whole
// blocks, with the manifest.
func newStress(t *testing.T, users int) (s *stress, largest int64) {
	// no runtime: what is put is its user's own
	s = &stress{epcached: &epcached{TB: t, site: newSite(t)}}
	dir := t.TempDir()
	for u := range users {
		o := newOwner(t, s.epcached, stranger+u)
		s.users = append(s.users, stressUser{o, openFile(t, o.library.Path)})
		var own []*stressModel
		for i := range stressModels {
			m := &stressModel{path: filepath.Join(dir, fmt.Sprintf("user%d-%d.onnx", u, i))}
			// one user's have the same weights, for another batch each
			require.NoError(t, os.WriteFile(m.path, compilertest.Dense(uint64(u), 256, i+1), 0o644))
			m.file = openFile(t, m.path)
			own = append(own, m)
		}
		s.models = append(s.models, own)
	}
	one := s.users[0]
	directory := t.TempDir()
	result, err := one.worker.Compile(limited(t),
		compilers.Job{Runtime: one.spec, Model: s.models[0][stressModels-1].path, Dir: directory,
			Output: "0000000000000000_ctx.onnx",
			EPs:    []compilers.EP{{Name: one.owner.library.EP, Library: one.owner.library.Path}}},
		nil)
	require.NoError(t, err)
	for _, name := range result.Files {
		info, err := os.Stat(filepath.Join(directory, name))
		require.NoError(t, err)
		largest += (info.Size() + 4095) / 4096 * 4096
	}
	return s, largest + 2*4096
}

// administrator collects now and then, and packs and unpacks.
func (s *stress) administrator(ctx context.Context, random *rand.Rand, packs bool) error {
	c, err := s.tryDial()
	if err != nil {
		return err
	}
	defer c.Close()
	no := func(*wire.Progress) {}
	for ctx.Err() == nil {
		time.Sleep(time.Duration(random.IntN(500)) * time.Millisecond)
		call, cancel := context.WithTimeout(context.Background(), patience)
		switch what := random.IntN(4); {
		case what == 0 || !packs:
			_, err = unixsock.Ask[wire.CollectReply](call, c, &wire.Collect{}, no)
		case what == 1:
			if _, err = unixsock.Ask[wire.PackReply](call, c, &wire.Pack{All: true, Unpack: true},
				no); errors.Is(err, unixsock.ErrNoSpace) {
				err = nil // within the budget there is no place for all of them
			}
		default:
			_, err = unixsock.Ask[wire.PackReply](call, c, &wire.Pack{All: true}, no)
		}
		cancel()
		if err != nil {
			return fmt.Errorf("administrator: %w", err)
		}
	}
	return nil
}

// onDisk is what lies below the state directory at one moment, but for the database, the journal,
// the reserve and the quarantine, each file once whatever names it has: of what was found, that
// which is still there when all has been found, and so was then. It counts with the smaller of two
// sizes. where says in which directories.
func (s *stress) onDisk() (sum int64, where string) {
	type file struct {
		dev, ino uint64
	}
	found, sizes, dirs := make(map[file]string), make(map[file]int64), make(map[string]int64)
	for _, dir := range []string{"views", "staging", "unpacked", "recipes", "manifests",
		"objects"} {
		// what goes meanwhile does not count
		_ = filepath.WalkDir(filepath.Join(s.state, dir),
			func(path string, e fs.DirEntry, err error) error {
				var st unix.Stat_t
				if err == nil && e.Type().IsRegular() && unix.Lstat(path, &st) == nil {
					found[file{st.Dev, st.Ino}], sizes[file{st.Dev, st.Ino}] = path, st.Blocks*512
				}
				return nil
			})
	}
	for id, path := range found {
		var st unix.Stat_t
		if unix.Lstat(path, &st) == nil && st.Dev == id.dev && st.Ino == id.ino {
			bytes := min(st.Blocks*512, sizes[id])
			sum += bytes
			below, _ := filepath.Rel(s.state, path)
			dir, rest, _ := strings.Cut(below, "/")
			if strings.HasPrefix(rest, "incoming") || strings.HasPrefix(rest, "objects/incoming") {
				dir += "/incoming"
			}
			dirs[dir] += bytes
		}
	}
	return sum, fmt.Sprint(dirs)
}

// requireToldOf requires that each build that was acknowledged is there, or that its going was
// told.
func (s *stress) requireToldOf(c *unixsock.Client) {
	s.Helper()
	there := func(key any) bool {
		builds, err := listAll(limited(s), c)
		require.NoError(s, err)
		return slices.ContainsFunc(builds, func(b *wire.Build) bool { return b.Build == key })
	}
	s.kept.Range(func(key, _ any) bool {
		if there(key) {
			return true
		}
		why, err := unixsock.Ask[wire.Explanation](limited(s), c, &wire.Why{Entry: key.(string)},
			nil)
		require.NoError(s, err)
		if !strings.Contains(why.Reason, "evicted on ") {
			// of what is put again at last, the room is no longer waited for and it is just being
			// stored
			require.True(s, there(key), "build %s went without a word: %s", key, why.Reason)
		}
		return true
	})
}
