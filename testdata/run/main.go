//go:build linux && (amd64 || arm64)

// Command run loads graphs with ONNX Runtime, in order and in one process, runs each on inputs that
// follow from a seed, and writes the bytes of all outputs to descriptor 3. Tests compare them:
// compilertest.Outputs builds it and gives it an [Order].
package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log"
	"math"
	"math/rand/v2"
	"os"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/workerproto"
)

// Order is the only argument, in JSON.
type Order struct {
	ORTLibrary string
	EPs        []workerproto.EP
	Session    workerproto.Session
	Graphs     []string
	Seed       uint64
}

func main() {
	out, err := os.NewFile(3, "outputs"), error(nil) // libraries print to standard output
	var o Order
	if err = json.Unmarshal([]byte(os.Args[1]), &o); err == nil {
		var data []byte
		if data, err = o.run(); err == nil {
			_, err = out.Write(data)
		}
	}
	if err != nil {
		log.Fatal(err)
	}
	os.Exit(0) // without destructors of C
}

func (o Order) run() (data []byte, err error) {
	api, err := ort.Open(o.ORTLibrary)
	if err != nil {
		return nil, err
	}
	env, err := api.NewEnv(os.Stderr, nil)
	if err != nil {
		return nil, err
	}
	for _, ep := range o.EPs {
		if err := env.Register(ep.Name, ep.Library); err != nil {
			return nil, err
		}
	}
	var sessions []*ort.Session
	for _, graph := range o.Graphs {
		s, err := o.open(env, graph)
		if err != nil {
			return nil, err
		}
		sessions = append(sessions, s)
	}
	for _, s := range sessions {
		inputs, err := s.Inputs()
		if err != nil {
			return nil, err
		}
		for i := range inputs {
			if err := fill(&inputs[i], o.Seed+uint64(i)); err != nil {
				return nil, err
			}
		}
		outputs, err := s.Run(inputs)
		if err != nil {
			return nil, err
		}
		for _, t := range outputs {
			data = append(data, t.Data...)
		}
	}
	return data, nil
}

func (o Order) open(env *ort.Env, graph string) (*ort.Session, error) {
	options, err := env.NewSessionOptions()
	if err != nil {
		return nil, err
	}
	for key, value := range o.Session.SessionOptions {
		if err := options.Set(key, value); err != nil {
			return nil, err
		}
	}
	if level := o.Session.GraphOptimizationLevel; level != "" {
		if err := options.SetGraphOptimization(level); err != nil {
			return nil, err
		}
	}
	for _, ep := range o.EPs {
		devices, err := env.DevicesOf(ep.Name)
		if err != nil {
			return nil, err
		}
		if len(ep.Devices) > 0 {
			devices = selected(ep.Devices[0], devices)
		}
		if err := options.Append(devices, ep.Options); err != nil {
			return nil, err
		}
	}
	return options.Open(graph)
}

func selected(by workerproto.DeviceSelector, devices []ort.Device) (list []ort.Device) {
	for _, d := range devices {
		if by.Fits(d.DeviceFacts) {
			list = append(list, d)
		}
	}
	return list
}

// fill gives an input floats between -1 and 1. Free dimensions become 1.
func fill(t *ort.Tensor, seed uint64) error {
	if t.Type != ort.Float {
		return fmt.Errorf("input %q: element type %d is not supported", t.Name, t.Type)
	}
	count := int64(1)
	for i := range t.Shape {
		t.Shape[i] = max(t.Shape[i], 1)
		count *= t.Shape[i]
	}
	random := rand.New(rand.NewPCG(seed, 2))
	for range count {
		t.Data = binary.LittleEndian.AppendUint32(t.Data, math.Float32bits(2*random.Float32()-1))
	}
	return nil
}
