package cache

import (
	"context"
	"encoding/json"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/compilers/compilertest"
)

// queuedBefore has a compile of a file with this mode queued by the daemon's own user, or another,
// and ends the daemon while it runs.
func queuedBefore(t *testing.T, uid func(*bench) uint32, mode os.FileMode) (b *bench, g *gate,
	later *request.Answer, model *os.File) {
	b, g = jobbing(t, 1)
	r := b.laterRequest(1, uid(b))
	require.NoError(t, os.Chmod(r.Graph.Name(), mode))
	later, err := b.cache.Acquire(context.Background(), r, nil)
	require.NoError(t, err)
	require.Equal(t, request.Later, later.Outcome)
	b.begins(g, 1)
	b.close()
	return b, g, later, r.Graph
}

func daemonUID(b *bench) uint32 { return b.cache.uid }

// kinds waits for an event of the kind, and gives its text.
func (b *bench) happens(kind string) string {
	b.Helper()
	text := ""
	require.Eventually(b, func() bool {
		for _, e := range b.events(request.Peer{}) {
			if e.Kind == kind {
				text = e.Text
			}
		}
		return text != ""
	}, soon, time.Millisecond)
	return text
}

func (b *bench) requireNoRebuilds() {
	b.Helper()
	require.Eventually(b, func() bool {
		rows, err := b.cache.index.Wanted.All()
		return err == nil && len(rows) == 0
	}, soon, 10*time.Millisecond)
}

func TestQueuedJobsOutliveTheDaemon(t *testing.T) {
	t.Run("of its own user",
		func(t *testing.T) { testQueuedJobOutlivesTheDaemon(t, daemonUID, 0o600) })
	t.Run("of another user, with a model that all may read", func(t *testing.T) {
		testQueuedJobOutlivesTheDaemon(t, func(*bench) uint32 { return somebody }, 0o644)
	})
}

func testQueuedJobOutlivesTheDaemon(t *testing.T, uid func(*bench) uint32, mode os.FileMode) {
	b, g, later, _ := queuedBefore(t, uid, mode)
	b.open()
	b.begins(g, 2)
	listed := b.jobs(0)
	require.Len(t, listed, 1)
	require.Equal(t, later.Job, listed[0].ID, "whoever follows it by its id finds it")
	require.Equal(t, later.RequestKey, listed[0].RequestKey)
	require.True(t, listed[0].Background)
	require.Equal(t, "requested before the daemon's restart", listed[0].Why)
	close(g.pass)
	require.Equal(t, jobs.Done, b.follow(0, later.Job).State)
	b.requireNoRebuilds()
	b.reopen()
	require.Empty(t, b.jobs(0), "what is done is not taken up")
	require.Len(t, b.list(), 1)
}

// A queued job is recorded before the answer, because a daemon that is killed cannot do it later.
func TestQueuedJobsAreNotedBeforeTheAnswer(t *testing.T) {
	b, g := jobbing(t, 1)
	later := b.later1(1, b.cache.uid)
	rows, err := b.cache.index.Wanted.All()
	require.NoError(t, err)
	require.Contains(t, rows, later.Job)
	_, err = b.cache.JobList.Cancel(context.Background(), b.self(), []string{later.Job}, false)
	require.NoError(t, err)
	b.requireNoRebuilds() // what its user cancelled does not come back
	close(g.pass)
}

func TestQueuedJobsThatCannotResumeAreReported(t *testing.T) {
	for name, c := range map[string]struct {
		uid   func(*bench) uint32
		spoil func(path string) error
		says  string
	}{
		"another user's": {func(*bench) uint32 { return somebody }, nil,
			"the daemon cannot open the model by itself"},
		"a model that has changed": {daemonUID,
			func(path string) error {
				return os.WriteFile(path, compilertest.Dense(9, 8, 1),
					0o644)
			}, "has changed"},
		"a model that is gone": {daemonUID, os.Remove, "the source model is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			b, g, later, model := queuedBefore(t, c.uid, 0o600)
			if c.spoil != nil {
				require.NoError(t, c.spoil(model.Name()))
			}
			b.open()
			text := b.happens(event.Cancelled)
			require.Contains(t, text, "not compiled after the daemon's restart: ")
			require.Contains(t, text, c.says)
			require.Empty(t, b.jobs(0))
			require.Len(t, g.begun(), 1)
			b.requireNoRebuilds()
			require.Equal(t, []string{event.Cancelled}, b.kinds(later.RequestKey))
		})
	}
}

// A job of which no daemon sees the end may be what ends them: it is taken up less and less, and
// then not any more.
func TestQueuedJobsThatEndDaemonsAreGivenUp(t *testing.T) {
	b, g, later, _ := queuedBefore(t, daemonUID, 0o600)
	starts := func() int {
		rows, err := b.cache.index.Wanted.All()
		require.NoError(t, err)
		w := upkeep.QueuedJob{Starts: -1}
		_ = json.Unmarshal(rows[later.Job], &w)
		return w.Starts
	}
	taken := func() { // and noted: a job may begin before it is
		t.Helper()
		require.Eventually(t, func() bool { return starts() == 1 }, soon, time.Millisecond)
	}
	for i := range 2 {
		b.open()
		b.begins(g, 2+i)
		taken()
		b.close()
	}
	b.open()
	b.begins(g, 4)
	taken()
	rows, err := b.cache.index.Wanted.All()
	require.NoError(t, err)
	require.NoError(t, b.cache.index.Wanted.SaveNow([]byte("another"), rows[later.Job]))
	b.cache.backlog.Resume(context.Background(), map[string][]byte{"another": rows[later.Job]})
	time.Sleep(100 * time.Millisecond)
	rows, err = b.cache.index.Wanted.All()
	require.NoError(t, err)
	require.Contains(t, rows, "another",
		"it is not taken up at once, and so not found to be the same")
	b.cache.backlog.Resume(context.Background(),
		map[string][]byte{"another": []byte(`{"Name": "model.onnx", "Starts": 3}`)})
	require.Contains(t, b.happens(event.Cancelled), "daemons ended before it was compiled")
	close(g.pass)
	require.Equal(t, jobs.Done, b.follow(0, later.Job).State)
	b.requireNoRebuilds()
}
