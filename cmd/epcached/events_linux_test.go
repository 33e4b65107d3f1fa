package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/clients/epcache"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func explain(r *wire.Acquire) { r.OnMiss = wire.OnMiss_EXPLAIN }

// follow subscribes. Nothing reports when the daemon has begun with that, but events.
func (d *epcached) follow(t *testing.T) (events <-chan *wire.Event, ended <-chan error) {
	c := d.dial()
	ctx, cancel := context.WithCancel(context.Background())
	heard, end := make(chan *wire.Event, 1000), make(chan error, 1)
	go func() {
		end <- c.Subscribe(ctx, func(e *wire.Event) error { heard <- e; return nil })
	}()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, c.Close())
	})
	return heard, end
}

// waitForEvent returns the next event of the kind and model, or nil after the time.
func waitForEvent(events <-chan *wire.Event, kind, model string, within time.Duration) *wire.Event {
	late := time.After(within)
	for {
		select {
		case e := <-events:
			if e.GetKind() == kind && e.GetModel() == model {
				return e
			}
		case <-late:
			return nil
		}
	}
}

// compileAndHear compiles models until a subscriber hears of one.
func (d *epcached) compileAndHear(t *testing.T, c *unixsock.Client,
	events <-chan *wire.Event) (string, lease, *wire.Event) {
	dir := t.TempDir()
	for seed, within := uint64(0), 100*time.Millisecond; within < patience; seed, within = seed+1,
		2*within {
		model := writeModel(t, dir, seed)
		made := get(t, c, model)
		require.Equal(t, "compiled", made.GetOutcome())
		if e := waitForEvent(events, "compiled", filepath.Base(model), within); e != nil {
			return model, made, e
		}
	}
	t.Fatal("the subscriber hears nothing")
	return "", lease{}, nil
}

func TestStoryOfAModel(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	c := d.dial()
	defer c.Close()
	events, _ := d.follow(t)

	before := get(t, c, writeModel(t, t.TempDir(), 0), explain)
	require.Equal(t, "miss", before.GetExplanation().GetDecision())
	require.Nil(t, before.view)
	require.Empty(t, d.list(), "an explanation compiles nothing")

	model, made, heard := d.compileAndHear(t, c, events)
	require.Equal(t, "same library", made.GetCompatibilitySource())
	require.Equal(t, made.GetRequestKey(), heard.GetRequestKey())
	require.Equal(t, made.GetBuild(), heard.GetBuild())
	require.NotZero(t, heard.GetSequence())

	past, err := unixsock.Ask[wire.EventsReply](limited(t), c, &wire.Events{}, nil)
	require.NoError(t, err)
	var kept *wire.Event
	for _, e := range past.GetEvents() {
		if e.GetSequence() == heard.GetSequence() {
			kept = e
		}
	}
	require.Equal(t, "compiled", kept.GetKind(), "what was heard is kept")

	after := get(t, c, model, explain).GetExplanation()
	require.Equal(t, "hit", after.GetDecision())
	require.True(t, after.GetCandidates()[0].GetServed())
	require.Equal(t, made.GetBuild(), after.GetCandidates()[0].GetBuild().GetBuild())

	why, err := unixsock.Ask[wire.Explanation](limited(t), c,
		&wire.Why{Entry: filepath.Base(model)}, nil)
	require.NoError(t, err)
	require.Equal(t, "current", why.GetDecision())
	require.NotEmpty(t, why.GetHistory())
	advice, err := unixsock.Ask[wire.DoctorReply](limited(t), c, &wire.Doctor{}, nil)
	require.NoError(t, err)
	require.NotEmpty(t, advice.GetAdvice())
	_, err = unixsock.Ask[wire.Explanation](limited(t), c, &wire.Why{Entry: "no such model"}, nil)
	require.ErrorIs(t, err, unixsock.ErrNotFound)
}

func TestStopEndsSubscriptions(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	c := d.dial()
	defer c.Close()
	events, ended := d.follow(t)
	d.compileAndHear(t, c, events)
	d.stop() // and requires that it ends well
	require.ErrorIs(t, <-ended, unixsock.ErrBusy)
}

func TestLoadThatIsRefused(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	c := d.dial()
	defer c.Close()
	model := writeModel(t, t.TempDir(), 1)
	refusal := &epcache.Refusal{Code: 10,
		Text: "[ONNXRuntimeError] : 10 : INVALID_GRAPH : not here"}
	request := func() epcache.Request {
		return epcache.Request{Acquire: forModel(model), Files: []*os.File{openFile(t, model)}}
	}
	loads := 0
	lease, err := epcache.Load(limited(t), c, request(), func(l *epcache.Lease) error {
		_, err := os.Stat(l.Path())
		require.NoError(t, err)
		if loads++; loads == 1 {
			// As if a disk had lost it: the daemon finds that, and gives another one.
			blob := filepath.Join(l.Reply.GetView(), l.Reply.GetGraph())
			require.NoError(t, os.Chmod(blob, 0o644))
			require.NoError(t, os.Truncate(blob, 10))
			return refusal
		}
		return nil
	})
	require.NoError(t, err)
	defer lease.Close()
	require.Equal(t, 2, loads)
	require.Equal(t, "compiled", lease.Reply.GetOutcome())

	_, err = epcache.Load(limited(t), c, request(), func(*epcache.Lease) error { return refusal })
	var refused *epcache.RefusedError
	require.ErrorAs(t, err, &refused, "a sound build is not given up for a word")
	require.Equal(t, "sound", refused.Decision[0].GetDecision())
	require.Equal(t, "hit", get(t, c, model).GetOutcome())
}
