//go:build linux && (amd64 || arm64)

package main

import (
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/dialogue"
	"github.com/epcached/epcached/compilers/ort"
)

// session loads a graph with the request's options. member is its place in a group.
func (j *job) session(graph string, member int) (*ort.Session, error) {
	if err := j.modelPhase(dialogue.PhaseLoading, member); err != nil {
		return nil, err
	}
	o, err := j.options()
	if err != nil {
		return nil, err
	}
	s, err := o.Open(graph)
	return s, step(err, "load %q", graph)
}

// load loads all graphs in order, and runs them if that is asked for. The sessions of a group end in
// reverse, as applications are told to; a single one stays until the process ends.
func (j *job) load() error {
	if j.req.Against != "" {
		return j.compareLoads()
	}
	var sessions []*ort.Session
	start := time.Now()
	for i, m := range j.models() {
		s, err := j.session(m.Model, i)
		if err != nil {
			return err
		}
		sessions = append(sessions, s)
	}
	j.result.Seconds = time.Since(start).Seconds()
	if j.req.Zeros > 0 {
		if err := j.runOnZeros(sessions); err != nil {
			return err
		}
	}
	if len(sessions) > 1 {
		for _, s := range slices.Backward(sessions) {
			s.Release()
		}
	}
	return nil
}

// compareLoads measures the processor time of one load of the compiled graph and of one of its
// source. The time does not depend on what else the machine does. The graph is loaded once before,
// because the first session in a process also pays for what the EP sets up once.
func (j *job) compareLoads() error {
	sizes := j.req.Options
	fixed := sizes
	fixed.FreeDimensions, fixed.FreeDimensionsByDenotation = nil, nil
	for i, model := range []string{j.req.Model, j.req.Model, j.req.Against} {
		j.req.Options = fixed
		if model == j.req.Against {
			j.req.Options = sizes
		}
		before, start := processorTime(), time.Now()
		s, err := j.session(model, 0)
		if err != nil {
			return err
		}
		if i == 0 {
			j.result.Seconds = time.Since(start).Seconds()
		} else {
			j.result.LoadCPU = append(j.result.LoadCPU, (processorTime() - before).Seconds())
		}
		s.Release()
	}
	return nil
}

func processorTime() time.Duration {
	var usage unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &usage) // it cannot fail for this process
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
