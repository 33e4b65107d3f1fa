//go:build linux && (amd64 || arm64)

package main

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"time"

	"github.com/epcached/epcached/compilers/dialogue"
	"github.com/epcached/epcached/compilers/ort"
)

// run feeds a graph inputs that follow from a seed, and writes the bytes of all outputs of the last round to a file, one after the other. Tests
// compare them.
func (j *job) run() error {
	if len(j.req.Share) > 0 {
		return j.runGroup()
	}
	session, err := j.session()
	if err != nil {
		return err
	}
	if err := j.phase(dialogue.PhaseRunning); err != nil {
		return err
	}
	outputs, err := j.runSession(session)
	if err != nil {
		return err
	}
	return j.writeOutputs(outputs)
}

// runSession gives the outputs of the last round.
func (j *job) runSession(session *ort.Session) ([]ort.Tensor, error) {
	inputs, err := session.Inputs()
	if err != nil {
		return nil, step(err, "inputs")
	}
	for i := range inputs {
		if err := seed(&inputs[i], j.req.Seed+uint64(i)); err != nil {
			return nil, err
		}
	}
	var outputs []ort.Tensor
	for range max(1, j.req.Times) {
		start := time.Now()
		if outputs, err = session.Run(inputs); err != nil {
			return nil, step(err, "run")
		}
		j.result.RunSeconds = append(j.result.RunSeconds, time.Since(start).Seconds())
	}
	return outputs, nil
}

func (j *job) writeOutputs(outputs []ort.Tensor) error {
	var all []byte
	for _, t := range outputs {
		j.result.Outputs = append(j.result.Outputs, dialogue.Tensor{Name: t.Name, Type: t.Type, Shape: t.Shape, Offset: int64(len(all)), Length: int64(len(t.Data))})
		all = append(all, t.Data...)
	}
	if j.req.Output == "" {
		return nil
	}
	return os.WriteFile(j.req.Output, all, 0o600)
}

// maxInput bounds the memory of a seeded input, in bytes.
const maxInput = 1 << 30

// Element types: ONNXTensorElementDataType.
const (
	typeFloat, typeUint8, typeInt8, typeUint16, typeInt16, typeInt32, typeInt64 = 1, 2, 3, 4, 5, 6, 7
	typeBool, typeFloat16, typeDouble, typeUint32, typeUint64, typeBfloat16     = 9, 10, 11, 12, 13, 16
)

// seed fills an input: floats between -1 and 1, whole numbers from 0 to 7 (which are valid as token ids and indices), truth values. Free dimensions
// become 1.
func seed(t *ort.Tensor, seed uint64) error {
	count := int64(1)
	for i, dim := range t.Shape {
		if dim < 0 {
			t.Shape[i] = 1
		}
		if count *= t.Shape[i]; count < 0 || count > maxInput {
			return fmt.Errorf("input %q of shape %v: more than %d elements", t.Name, t.Shape, int64(maxInput))
		}
	}
	random := rand.New(rand.NewPCG(seed, 2))
	var data []byte
	for range count {
		var err error
		if data, err = appendElement(data, t.Type, random); err != nil {
			return fmt.Errorf("input %q: %w", t.Name, err)
		}
	}
	t.Data = data
	return nil
}

func appendElement(b []byte, kind int32, random *rand.Rand) ([]byte, error) {
	switch kind {
	case typeFloat:
		return binary.LittleEndian.AppendUint32(b, math.Float32bits(2*random.Float32()-1)), nil
	case typeDouble:
		return binary.LittleEndian.AppendUint64(b, math.Float64bits(2*random.Float64()-1)), nil
	case typeFloat16: // between 0.5 and 1: exponent 14, ten random bits
		return binary.LittleEndian.AppendUint16(b, 14<<10|uint16(random.UintN(1<<10))), nil
	case typeBfloat16: // between 0.5 and 1: exponent 126, seven random bits
		return binary.LittleEndian.AppendUint16(b, 126<<7|uint16(random.UintN(1<<7))), nil
	case typeBool:
		return append(b, byte(random.UintN(2))), nil
	case typeUint8, typeInt8:
		return append(b, byte(random.UintN(8))), nil
	case typeUint16, typeInt16:
		return binary.LittleEndian.AppendUint16(b, uint16(random.UintN(8))), nil
	case typeInt32, typeUint32:
		return binary.LittleEndian.AppendUint32(b, uint32(random.UintN(8))), nil
	case typeInt64, typeUint64:
		return binary.LittleEndian.AppendUint64(b, uint64(random.UintN(8))), nil
	}
	return nil, fmt.Errorf("element type %d is not supported", kind)
}
