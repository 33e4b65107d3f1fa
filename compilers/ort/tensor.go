//go:build linux && (amd64 || arm64)

package ort

import (
	"fmt"
	"runtime"
	"unsafe"
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
	api := s.env.api
	var n uintptr
	if err := api.do(count, s.ptr, &n); err != nil {
		return nil, err
	}
	var allocator handle // ORT's own: not to be released
	if err := api.do(fnGetAllocatorWithDefaultOptions, &allocator); err != nil {
		return nil, err
	}
	var names []string
	for i := range int(n) {
		var c handle
		if err := api.do(name, s.ptr, i, allocator, &c); err != nil {
			return nil, err
		}
		names = append(names, text(c))
		if err := api.do(fnAllocatorFree, allocator, c); err != nil {
			return nil, err
		}
	}
	return names, nil
}

func (s *Session) inputType(i int) (Tensor, error) {
	api := s.env.api
	var info, tensor handle
	if err := api.do(fnSessionGetInputTypeInfo, s.ptr, i, &info); err != nil {
		return Tensor{}, err
	}
	defer api.raw(fnReleaseTypeInfo, info)
	if err := api.do(fnCastTypeInfoToTensorInfo, info, &tensor); err != nil { // belongs to info
		return Tensor{}, err
	}
	if tensor == 0 {
		return Tensor{}, fmt.Errorf("not a tensor")
	}
	return api.typeAndShape(tensor)
}

func (a *API) typeAndShape(info handle) (Tensor, error) {
	var t Tensor
	var rank uintptr
	if err := a.do(fnGetTensorElementType, info, &t.Type); err != nil {
		return t, err
	}
	if err := a.do(fnGetDimensionsCount, info, &rank); err != nil {
		return t, err
	}
	t.Shape = make([]int64, rank)
	return t, a.do(fnGetDimensions, info, t.Shape, int(rank))
}

// Run computes all outputs. Data of the inputs must not change meanwhile; the outputs' data is a copy.
func (s *Session) Run(inputs []Tensor) ([]Tensor, error) {
	api := s.env.api
	var memory handle
	const deviceAllocator, defaultMemory = int32(0), int32(0)
	if err := api.do(fnCreateCpuMemoryInfo, deviceAllocator, defaultMemory, &memory); err != nil {
		return nil, err
	}
	defer api.raw(fnReleaseMemoryInfo, memory)
	// The tensors' memory is Go's, and ORT reads it after the call that hands it over: it stays pinned until the values are released.
	var pins runtime.Pinner
	defer pins.Unpin()
	var names []string
	var values []handle
	for _, t := range inputs {
		if len(t.Data) > 0 {
			pins.Pin(&t.Data[0])
		}
		var value handle
		if err := api.do(fnCreateTensorWithData, memory, t.Data, len(t.Data), t.Shape, len(t.Shape), t.Type, &value); err != nil {
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
	if err := api.do(fnRun, s.ptr, nil, names, values, len(names), outputs, len(outputs), results); err != nil {
		return nil, err
	}
	return api.takeOutputs(outputs, results)
}

// takeOutputs copies the results and releases all of them, also when one cannot be copied.
func (a *API) takeOutputs(names []string, values []handle) ([]Tensor, error) {
	var tensors []Tensor
	var failed error
	for i, value := range values {
		t, err := a.output(value)
		a.raw(fnReleaseValue, value)
		if err != nil && failed == nil {
			failed = fmt.Errorf("output %q: %w", names[i], err)
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
	var tensor int32
	if err := a.do(fnIsTensor, value, &tensor); err != nil {
		return Tensor{}, err
	}
	if tensor == 0 {
		return Tensor{}, fmt.Errorf("not a tensor")
	}
	var info, data handle
	if err := a.do(fnGetTensorTypeAndShape, value, &info); err != nil {
		return Tensor{}, err
	}
	defer a.raw(fnReleaseTensorTypeAndShapeInfo, info)
	t, err := a.typeAndShape(info)
	if err != nil {
		return Tensor{}, err
	}
	var size uintptr
	if err := a.do(fnGetTensorSizeInBytes, value, &size); err != nil { // refuses tensors of strings
		return Tensor{}, err
	}
	if size == 0 {
		return t, nil
	}
	if err := a.do(fnGetTensorMutableData, value, &data); err != nil {
		return Tensor{}, err
	}
	t.Data = append([]byte(nil), unsafe.Slice((*byte)(pointer(data)), size)...)
	return t, nil
}
