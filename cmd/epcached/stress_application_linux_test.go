package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// tally counts what became of requests.
type tally struct {
	hits, puts, refused, crowded, givenUp, died, busy atomic.Int64

	mu      sync.Mutex
	reasons map[string]int // of refusals, without numbers; guarded by mu
}

// refuse records a refusal for want of room.
func (n *tally) refuse(of *atomic.Int64, err error) {
	of.Add(1)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.reasons == nil {
		n.reasons = make(map[string]int)
	}
	_, why, _ := strings.Cut(err.Error(), "; ")
	n.reasons[regexp.MustCompile(`[0-9.]+ ([KM]i)?B|[0-9]+`).ReplaceAllString(why, "#")]++
}

// explain logs why there was no room, the most frequent reasons first.
func (n *tally) explain(t testing.TB) {
	n.mu.Lock()
	defer n.mu.Unlock()
	reasons := slices.SortedFunc(maps.Keys(n.reasons),
		func(a, b string) int { return n.reasons[b] - n.reasons[a] })
	for _, why := range reasons[:min(len(reasons), 12)] {
		t.Logf("%5d x no room: %s", n.reasons[why], why)
	}
}

func (n *tally) String() string {
	return fmt.Sprintf("%d hits, %d puts, %d of them kept, %d refused for want of room, %d "+
		"builds not unpacked for want of it, %d claims given up, %d left by who died, %d claims "+
		"too many", n.hits.Load(),
		n.puts.Load()+n.refused.Load(), n.puts.Load(), n.refused.Load(), n.crowded.Load(),
		n.givenUp.Load(), n.died.Load(), n.busy.Load())
}

// application is one of the hundred: it asks for one model after the other, and looks at what it
// holds when it has it and before it lets it go.
func (s *stress) application(ctx context.Context, random *rand.Rand, user int) error {
	c, err := s.users[user].tryConnect()
	if err != nil {
		return err
	}
	defer func() { c.Close() }()
	models := s.models[user]
	for ctx.Err() == nil {
		// some are used more than others
		m := models[min(random.IntN(len(models)), random.IntN(len(models)))]
		dies, err := s.useOnce(c, random, s.users[user], m)
		if err != nil {
			return fmt.Errorf("%s: %w", filepath.Base(m.path), err)
		}
		if dies {
			c.Close()
			if c, err = s.users[user].tryConnect(); err != nil {
				return err
			}
		}
	}
	return nil
}

// useOnce asks for a model once. dies: the application leaves with its claim, without a word.
func (s *stress) useOnce(c *unixsock.Client, random *rand.Rand, o stressUser,
	m *stressModel) (dies bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	one := uint32(1)
	request := forModel(m.path)
	request.OnMiss, request.HoldsView = wire.OnMiss_CLAIM, true
	request.Runtime = &wire.Runtime{OrtVersion: o.spec.ORTVersion,
		EpLibraries: []*wire.EpLibrary{{Ep: o.owner.library.EP, Path: o.owner.library.Path,
			Fd: &one}}}
	reply, view, err := c.Acquire(ctx, request, []*os.File{m.file, o.library}, nil, nil)
	if errors.Is(err, unixsock.ErrBusy) { // it may have the next claim within a second
		s.tally.busy.Add(1)
		time.Sleep(time.Duration(random.IntN(200)) * time.Millisecond)
		return false, nil
	}
	if errors.Is(err, unixsock.ErrNoSpace) { // it is packed, and all that is unpacked is in use
		s.tally.refuse(&s.tally.crowded, err)
		return false, nil
	}
	if err != nil {
		return false, err
	}
	a := lease{reply, view}
	if a.Outcome != "claim" {
		s.tally.hits.Add(1)
		return false, s.hold(random, a)
	}
	switch fate := random.IntN(20); {
	case fate == 0:
		s.tally.died.Add(1)
		return true, nil
	case fate == 1:
		s.tally.givenUp.Add(1)
		_, err = unixsock.Ask[wire.GiveUpReply](ctx, c,
			&wire.GiveUp{Claim: a.Claim.Id, Text: "changed its mind"}, nil)
		return false, err
	}
	if err := m.compile(ctx, o, a.AcquireReply); err != nil {
		return false, err
	}
	put := &wire.Put{Claim: a.Claim.Id, Files: m.put.Files, CompileSeconds: m.put.CompileSeconds,
		OrtVersion: m.put.OrtVersion, MadeBy: m.put.MadeBy}
	reply, view, err = c.Put(ctx, put, m.files, nil)
	if errors.Is(err, unixsock.ErrNoSpace) {
		s.tally.refuse(&s.tally.refused, err)
		_, err = unixsock.Ask[wire.GiveUpReply](ctx, c,
			&wire.GiveUp{Claim: a.Claim.Id, Text: "there is no room"}, nil)
		return false, err
	}
	if err != nil {
		return false, err
	}
	s.tally.puts.Add(1)
	return false, s.hold(random, lease{reply, view})
}

// hold reads the files of a lease, and again before the lease is closed.
func (s *stress) hold(random *rand.Rand, a lease) error {
	s.kept.Store(a.Build, true)
	before := a.wrong()
	time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond)
	if err := errors.Join(before, a.short(), a.view.Close()); err != nil {
		return fmt.Errorf("a file of a view that is held: %w", err)
	}
	return nil
}

// compile makes the artefact, the first time.
func (m *stressModel) compile(ctx context.Context, o stressUser,
	claim *wire.AcquireReply) (err error) {
	m.once.Do(func() {
		dir := strings.TrimSuffix(m.path, ".onnx")
		if err = os.Mkdir(dir, 0o700); err != nil {
			return
		}
		var result compilers.Result
		result, err = o.worker.Compile(ctx,
			compilers.Job{Runtime: o.spec, Model: m.path, Dir: dir,
				Output: claim.Claim.Output, Route: claim.Claim.Route,
				Session: compilers.Session{GraphOptimizationLevel: claim.GraphOptimizationLevel,
					SessionOptions: claim.SessionOptions},
				EPs: []compilers.EP{{Name: o.owner.library.EP, Library: o.owner.library.Path,
					Options: claim.ProviderOptions[o.owner.library.EP].GetEntries()}}}, nil)
		if err != nil {
			return
		}
		m.put = &wire.Put{CompileSeconds: result.Seconds, OrtVersion: result.ORTVersion}
		for _, ep := range result.EPs {
			m.put.MadeBy = append(m.put.MadeBy, &wire.MadeBy{Ep: ep.Name, Version: ep.Version})
		}
		for i, name := range result.Files {
			f, openErr := os.Open(filepath.Join(dir, name))
			err = errors.Join(err, openErr)
			m.put.Files, m.files = append(m.put.Files, &wire.PutFile{Name: name, Fd: uint32(i)}),
				append(m.files, f)
		}
	})
	if err == nil && m.put == nil {
		err = errors.New("it could not be compiled before")
	}
	return err
}
