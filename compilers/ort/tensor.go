//go:build linux && (amd64 || arm64)

package ort

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"slices"
)

// Tensor is a tensor in ordinary memory. Element types are ONNX's numbers.
type Tensor struct {
	Name  string
	Type  int32
	Shape []int64 // of an input's description: -1 where a dimension is free
	Data  []byte  // little-endian elements, in row-major order
}

// Inputs describes the session's inputs, without data. Inputs that are not tensors are an error.
func (s *Session) Inputs() ([]Tensor, error) {
	names, err := s.names(fnSessionGetInputCount, fnSessionGetInputName)
	if err != nil {
		return nil, err
	}
	var inputs []Tensor
	for i, name := range names {
		t, err := s.inputType(i)
		if err != nil {
			return nil, fmt.Errorf("input %q: %w", name, err)
		}
		t.Name = name
		inputs = append(inputs, t)
	}
	return inputs, nil
}

func (s *Session) names(count, name function) ([]string, error) {
	c := callSequence{API: s.env.api}
	var n uintptr
	var allocator handle // ORT's own: not to be released
	c.do(count, s.ptr, &n)
	c.do(fnGetAllocatorWithDefaultOptions, &allocator)
	var names []string
	for i := range int(n) {
		var one handle
		if c.do(name, s.ptr, i, allocator, &one) {
			names = append(names, text(one))
			c.do(fnAllocatorFree, allocator, one)
		}
	}
	return names, c.err
}

func (s *Session) inputType(i int) (Tensor, error) {
	c := callSequence{API: s.env.api}
	var info, tensor handle
	if !c.do(fnSessionGetInputTypeInfo, s.ptr, i, &info) {
		return Tensor{}, c.err
	}
	defer c.raw(fnReleaseTypeInfo, info)
	if c.do(fnCastTypeInfoToTensorInfo, info, &tensor) && tensor == 0 { // it belongs to info
		c.err = errNoTensor
	}
	t := c.typeAndShape(tensor)
	return t, c.err
}

var errNoTensor = errors.New("not a tensor")

func (c *callSequence) typeAndShape(info handle) (t Tensor) {
	var rank uintptr
	c.do(fnGetTensorElementType, info, &t.Type)
	c.do(fnGetDimensionsCount, info, &rank)
	t.Shape = make([]int64, rank)
	c.do(fnGetDimensions, info, t.Shape, int(rank))
	return t
}

func (c *callSequence) bytesOf(value handle) []byte {
	var size uintptr
	var data handle
	if c.do(fnGetTensorSizeInBytes, value, &size) && size > 0 { // refuses tensors of strings
		c.do(fnGetTensorMutableData, value, &data) // only read
	}
	return elementsAt[byte](data, size)
}

// Run computes all outputs. Data of the inputs must not change during the call; the outputs' data
// is a copy.
func (s *Session) Run(inputs []Tensor) ([]Tensor, error) {
	api := s.env.api
	var memory handle
	const deviceAllocator, defaultMemory = int32(0), int32(0)
	if err := api.do(fnCreateCpuMemoryInfo, deviceAllocator, defaultMemory, &memory); err != nil {
		return nil, err
	}
	defer api.raw(fnReleaseMemoryInfo, memory)
	// ORT reads the tensors' Go memory after the call that passes it, so it stays pinned until the
	// values are released.
	var pins runtime.Pinner
	defer pins.Unpin()
	var names []string
	var values []handle
	for _, t := range inputs {
		if len(t.Data) > 0 {
			pins.Pin(&t.Data[0])
		}
		var value handle
		if err := api.do(fnCreateTensorWithData, memory, t.Data, len(t.Data), t.Shape, len(t.Shape),
			t.Type, &value); err != nil {
			return nil, fmt.Errorf("input %q: %w", t.Name, err)
		}
		defer api.raw(fnReleaseValue, value)
		names, values = append(names, t.Name), append(values, value)
	}
	outputs, err := s.names(fnSessionGetOutputCount, fnSessionGetOutputName)
	if err != nil {
		return nil, err
	}
	results := make([]handle, len(outputs))
	if err := api.do(fnRun, s.ptr, nil, names, values, len(names), outputs, len(outputs),
		results); err != nil {
		return nil, err
	}
	return api.takeOutputs(outputs, results)
}

func (a *API) takeOutputs(names []string, values []handle) ([]Tensor, error) {
	var tensors []Tensor
	var failed error
	for i, value := range values {
		t, err := a.output(value)
		a.raw(fnReleaseValue, value)
		if err != nil {
			failed = cmp.Or(failed, fmt.Errorf("output %q: %w", names[i], err))
		}
		t.Name = names[i]
		tensors = append(tensors, t)
	}
	if failed != nil {
		return nil, failed
	}
	return tensors, nil
}

func (a *API) output(value handle) (Tensor, error) {
	c := callSequence{API: a}
	var tensor int32
	if c.do(fnIsTensor, value, &tensor) && tensor == 0 {
		c.err = errNoTensor
	}
	var info handle
	if !c.do(fnGetTensorTypeAndShape, value, &info) {
		return Tensor{}, c.err
	}
	defer c.raw(fnReleaseTensorTypeAndShapeInfo, info)
	t := c.typeAndShape(info)
	t.Data = slices.Clone(c.bytesOf(value))
	return t, c.err
}
