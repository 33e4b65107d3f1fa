package main

import (
	"context"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// inBackground asks for a model without waiting for it.
func inBackground(t *testing.T, c *unixsock.Client, model string) *wire.AcquireReply {
	t.Helper()
	r := forModel(model)
	r.OnMiss = wire.OnMiss_BACKGROUND
	reply, view, err := c.Acquire(limited(t), r, []*os.File{openFile(t, model)}, nil, nil)
	require.NoError(t, err)
	require.Nil(t, view)
	require.Equal(t, "background", reply.Outcome)
	require.NotEmpty(t, reply.RequestKey)
	return reply
}

func TestBackgroundJobOutlivesItsConnection(t *testing.T) {
	t.Parallel()
	d := stoppingSite(t).start(t)
	dir := t.TempDir()
	// so that the next worker is the compile's, and none that probes
	get(t, d.dial(), writeModel(t, dir, 2))
	model := writeStopping(t, dir, 1)
	c := d.dial()
	job := inBackground(t, c, model).Job
	resume := d.freeze()
	require.NoError(t, c.Close())
	c = d.dial()
	reply, err := unixsock.Ask[wire.JobsReply](limited(t), c, &wire.Jobs{}, nil)
	require.NoError(t, err)
	require.Len(t, reply.Jobs, 1)
	got := reply.Jobs[0]
	require.Equal(t, job, got.Id)
	require.Equal(t, "running", got.State)
	require.Equal(t, "compiling", got.Phase)
	require.Equal(t, "model1.onnx", got.ModelName)
	require.Equal(t, "OpenVINOExecutionProvider", got.Ep)
	require.EqualValues(t, os.Getuid(), got.Uid)
	require.True(t, got.Background)
	require.Positive(t, got.EstimateMs, "one of that size has been compiled before")
	require.Equal(t, job, inBackground(t, c, model).Job)
	resume()
	var phases []string
	ended, err := c.Follow(limited(t), &wire.Follow{Job: job}, func(p *wire.Progress) {
		require.Equal(t, job, p.Job)
		phases = append(phases, p.Phase)
	})
	require.NoError(t, err)
	require.Equal(t, "done", ended.State)
	require.Subset(t, []string{"compiling", "checking", "storing"}, phases)
	require.Equal(t, "hit", get(t, c, model).Outcome)
}

func TestCancelledJobEndsItsWorker(t *testing.T) {
	t.Parallel()
	d := stoppingSite(t).start(t)
	dir := t.TempDir()
	get(t, d.dial(), writeModel(t, dir, 2))
	c := d.dial()
	job := inBackground(t, c, writeStopping(t, dir, 1)).Job
	d.freeze()
	reply, err := unixsock.Ask[wire.JobsReply](limited(t), c, &wire.CancelJobs{Jobs: []string{job}},
		nil)
	require.NoError(t, err)
	require.Equal(t, "cancelled", reply.Jobs[0].State)
	require.Empty(t, keepersOf(d.pid()))
	require.Empty(t, entriesOf(t, d.state, "staging"))
	_, err = c.Follow(context.Background(), &wire.Follow{Job: "none"}, nil)
	require.ErrorIs(t, err, unixsock.ErrNotFound)
}
