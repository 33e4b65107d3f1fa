//go:build linux && (amd64 || arm64)

package main

import (
	"errors"
	"fmt"

	"github.com/epcached/epcached/compilers/dialogue"
	"github.com/epcached/epcached/compilers/ort"
)

const maxInput = 1 << 30

// compareOutputs runs the graph with the request's EPs, and the source model with ONNX Runtime's own
// kernels, both once on zeros, and compares.
func (j *job) compareOutputs() error {
	if len(j.req.Share) != 1 {
		return errors.New("the request names no source model")
	}
	sizes := j.req.Options
	j.req.Options.FreeDimensions, j.req.Options.FreeDimensionsByDenotation = nil, nil // fixed when it was compiled
	compiled, err := j.session(j.req.Model, 0)
	if err != nil {
		return err
	}
	inputs, why := zeros(compiled, 1)
	if why != nil {
		j.result.Compared = &dialogue.Compared{Without: why.Error()}
		return nil
	}
	got, err := compiled.Run(inputs)
	if err != nil {
		return step(err, "run %q", j.req.Model)
	}
	compiled.Release()
	if err := j.modelPhase(dialogue.PhaseRunning, 1); err != nil {
		return err
	}
	j.req.Options = sizes
	want, err := j.original(inputs)
	if err != nil {
		j.result.Compared = &dialogue.Compared{Without: "the source model does not run on the CPU: " + err.Error()}
		return nil
	}
	difference, err := compare(got, want, j.req.Most)
	j.result.Compared = &dialogue.Compared{Difference: difference, Outputs: len(want)}
	if err != nil {
		j.result.Compared.Without = err.Error()
	}
	return nil
}

// original runs the source model without any of the EPs, and without the session options that are meant for them.
func (j *job) original(inputs []ort.Tensor) ([]ort.Tensor, error) {
	j.req.EPs, j.req.Options.Entries, j.req.Options.GraphOptimizationLevel = nil, nil, ""
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

// runOnZeros runs each session once. That inputs cannot be made is no failure of the graph.
func (j *job) runOnZeros(sessions []*ort.Session) error {
	for i, s := range sessions {
		inputs, err := zeros(s, j.req.Zeros)
		if err != nil {
			j.result.NotRun = err.Error()
			continue
		}
		if err := j.modelPhase(dialogue.PhaseRunning, i); err != nil {
			return err
		}
		if _, err := s.Run(inputs); err != nil {
			return step(err, "run")
		}
	}
	return nil
}

// zeros makes the session's inputs, with free dimensions of that size.
func zeros(s *ort.Session, free int64) ([]ort.Tensor, error) {
	inputs, err := s.Inputs()
	if err != nil {
		return nil, err
	}
	for i := range inputs {
		t := &inputs[i]
		size, known := ort.ElementSizes[t.Type]
		if !known {
			return nil, fmt.Errorf("input %q: zeros of element type %d are not supported", t.Name, t.Type)
		}
		for d, dim := range t.Shape {
			if dim < 0 {
				t.Shape[d], dim = free, free
			}
			if size *= dim; size > maxInput || size < 0 {
				return nil, fmt.Errorf("input %q of shape %v: more than %d bytes", t.Name, t.Shape, int64(maxInput))
			}
		}
		t.Data = make([]byte, size)
	}
	return inputs, nil
}
