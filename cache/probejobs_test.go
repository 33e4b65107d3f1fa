package cache

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
)

// slowProbe finds out nothing before it may.
type slowProbe struct {
	compilers.Compiler
	began, pass chan struct{}
}

func (s *slowProbe) Fingerprint(ctx context.Context, r compilers.Runtime, eps []compilers.EP,
	own *compilers.Job) ([]compilers.Fingerprint, error) {
	s.began <- struct{}{}
	select {
	case <-s.pass:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return s.Compiler.Fingerprint(ctx, r, eps, own)
}

func slowToKnow(t *testing.T) (*bench, *slowProbe) {
	s := &slowProbe{began: make(chan struct{}, 8), pass: make(chan struct{})}
	b := newBenchWith(t, func(o *Options) { s.Compiler, o.Compiler = o.Compiler, s })
	return b, s
}

func TestALongProbeIsListedAsAJob(t *testing.T) {
	b, s := slowToKnow(t)
	r := b.request(b.model(1))
	r.Peer.UID, r.Name = somebody, "mine.onnx"
	asked := b.ask(context.Background(), r)
	<-s.began
	var listed []jobs.Info
	require.Eventually(t, func() bool {
		listed = b.jobs(somebody)
		// the daemon itself began it, perhaps
		return len(listed) == 1 && listed[0].State == jobs.Running && listed[0].Phase == "probing"
	}, soon, time.Millisecond)
	require.Equal(t, "mine.onnx", listed[0].ModelName)
	require.Equal(t, 1, listed[0].Waiting)
	require.Contains(t, listed[0].Why, "probed first")
	require.Empty(t, b.jobs(somebodyElse), "others do not see it")

	ctx, leave := context.WithCancel(context.Background())
	second := b.ask(ctx, r)
	require.Eventually(t, func() bool { return b.jobs(somebody)[0].Waiting == 2 }, soon,
		time.Millisecond)
	leave()
	require.Equal(t, apierr.Cancelled, apierr.ClassOf((<-second).err))
	close(s.pass)
	b.served(asked)
	require.Len(t, s.began, 0, "it was found out once")
	require.Empty(t, b.jobs(somebody))
}

func TestALongFirstUseCanBeGivenUp(t *testing.T) {
	b, s := slowToKnow(t)
	r := b.request(b.model(1))
	r.Peer.UID = somebody
	asked := b.ask(context.Background(), r)
	<-s.began
	require.Eventually(t, func() bool { return len(b.jobs(somebody)) == 1 }, soon, time.Millisecond)
	// of a user only the own part: the daemon may want to know too
	ended, err := b.cache.JobList.Cancel(context.Background(), request.Peer{UID: 0},
		[]string{b.jobs(somebody)[0].ID}, false)
	require.NoError(t, err)
	require.Len(t, ended, 1)
	require.Equal(t, jobs.Cancelled, ended[0].State)
	e := (<-asked).err
	require.Equal(t, apierr.Cancelled, apierr.ClassOf(e), "%v", e)
	for _, e := range b.events(request.Peer{UID: 0}) {
		require.NotEqual(t, event.Cancelled, e.Kind, "no compile was")
	}
	require.Zero(t, b.cache.jobs.Count())
	again := b.ask(context.Background(), r)
	<-s.began // what was given up is nothing that is remembered
	close(s.pass)
	b.served(again)
}

func TestAProbeContinuesWhenItsRequestLeaves(t *testing.T) {
	b, s := slowToKnow(t)
	ctx, leave := context.WithCancel(context.Background())
	asked := b.ask(ctx, b.request(b.model(1)))
	<-s.began
	leave()
	require.Equal(t, apierr.Cancelled, apierr.ClassOf((<-asked).err))
	close(s.pass)
	b.acquire(b.request(b.model(1)))
	require.Len(t, s.began, 0, "whoever asks next has what it brought")
}
