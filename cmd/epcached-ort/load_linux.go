//go:build linux && (amd64 || arm64)

package main

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/workerproto"
)

// session loads a graph with the request's options. member is its index in a group.
func (j *job) session(graph string, member int) (*ort.Session, error) {
	if err := j.modelPhase(workerproto.PhaseLoading, member); err != nil {
		return nil, err
	}
	o, err := j.options()
	if err != nil {
		return nil, err
	}
	s, err := o.Open(graph)
	return s, step(err, "load %q", graph)
}

// load loads all graphs in order, and runs them if requested. The sessions of a group are released
// in reverse, as ONNX Runtime requires; a single one is kept until the process ends.
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
// source. Processor time does not depend on other load. The graph is loaded once before, because
// the first session in a process includes the EP's one-time set-up.
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
	_ = unix.Getrusage(unix.RUSAGE_SELF, &usage) // cannot fail for this process
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

const maxInput = 1 << 30

// compareOutputs runs the graph with the request's EPs, and the source model with ONNX Runtime's
// own kernels, both once on zeros, and compares.
func (j *job) compareOutputs() error {
	if len(j.req.Share) != 1 {
		return errors.New("the request names no source model")
	}
	sizes := j.req.Options
	// The compiled graph has fixed dimensions.
	j.req.Options.FreeDimensions, j.req.Options.FreeDimensionsByDenotation = nil, nil
	compiled, err := j.session(j.req.Model, 0)
	if err != nil {
		return err
	}
	inputs, why := zeros(compiled, 1)
	if why != nil {
		j.result.Compared = &workerproto.Compared{Without: why.Error()}
		return nil
	}
	got, err := compiled.Run(inputs)
	if err != nil {
		return step(err, "run %q", j.req.Model)
	}
	compiled.Release()
	if err := j.modelPhase(workerproto.PhaseRunning, 1); err != nil {
		return err
	}
	j.req.Options = sizes
	want, err := j.runSourceModel(inputs)
	if err != nil {
		j.result.Compared = &workerproto.Compared{
			Without: "the source model does not run on the CPU: " + err.Error()}
		return nil
	}
	difference, err := ort.Compare(got, want, j.req.Most)
	j.result.Compared = &workerproto.Compared{Difference: difference, Outputs: len(want),
		Sizes: !slices.EqualFunc(got, want, ort.Tensor.IsLike)}
	if err != nil {
		j.result.Compared.Without = err.Error()
	}
	return nil
}

// runSourceModel runs the source model without the EPs and without session options for them.
func (j *job) runSourceModel(inputs []ort.Tensor) ([]ort.Tensor, error) {
	j.req.EPs, j.req.Options.SessionOptions, j.req.Options.GraphOptimizationLevel = nil, nil, ""
	o, err := j.options()
	if err != nil {
		return nil, err
	}
	s, err := o.Open(j.req.Share[0].Model)
	if err != nil {
		return nil, err
	}
	defer s.Release()
	return s.Run(inputs)
}

// runOnZeros runs each session once. If inputs cannot be made, the graph does not fail.
func (j *job) runOnZeros(sessions []*ort.Session) error {
	for i, s := range sessions {
		inputs, err := zeros(s, j.req.Zeros)
		if err != nil {
			j.result.NotRun = err.Error()
			continue
		}
		if err := j.modelPhase(workerproto.PhaseRunning, i); err != nil {
			return err
		}
		if _, err := s.Run(inputs); err != nil {
			return step(err, "run")
		}
	}
	return nil
}

// zeros makes the session's inputs from zeros, with free dimensions of that size.
func zeros(s *ort.Session, free int64) ([]ort.Tensor, error) {
	inputs, err := s.Inputs()
	if err != nil {
		return nil, err
	}
	for i := range inputs {
		t := &inputs[i]
		size, known := ort.ElementSizes[t.Type]
		if !known {
			return nil, fmt.Errorf("input %q: zeros of element type %d are not supported",
				t.Name, t.Type)
		}
		for d, dim := range t.Shape {
			if dim < 0 {
				t.Shape[d], dim = free, free
			}
			if size *= dim; size > maxInput || size < 0 {
				return nil, fmt.Errorf("input %q of shape %v: more than %d bytes", t.Name, t.Shape,
					int64(maxInput))
			}
		}
		t.Data = make([]byte, size)
	}
	return inputs, nil
}
