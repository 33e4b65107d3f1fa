package cache

import (
	"fmt"
	"strings"

	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/failure"
	"github.com/epcached/epcached/requests"
)

// suitsOutput compares a graph that others made with what was asked for, and says what differs.
func suitsOutput(o *requests.RecordOutput, m *epmodel.Model) error {
	for _, location := range m.Locations() {
		switch {
		case o == nil:
			return fmt.Errorf("initializers are in the file %q, and none was asked for", location)
		case !o.InitializersInSource && location != o.InitializersFile:
			return fmt.Errorf("initializers are in the file %q, and %q was asked for", location, o.InitializersFile)
		}
	}
	return nil
}

// complete compares a graph with the wish that no node is left to the CPU.
func complete(c *requests.Record, m *epmodel.Model) error {
	if rest := m.Nodes - len(m.Contexts); rest > 0 && c.SessionOptions["session.disable_cpu_ep_fallback"] == "1" {
		return fmt.Errorf("%d nodes are left to other execution providers, and none was to be", rest)
	}
	return nil
}

// saidOfFallback is what ONNX Runtime says of a session that may leave no node to the CPU, and would have to.
const saidOfFallback = "fallback to CPU EP has been explicitly disabled"

// aboutFallback adds to a failure that it was the request's own wish which the model cannot be compiled with.
func aboutFallback(f *failure.Failure, c *requests.Record) {
	if c.SessionOptions["session.disable_cpu_ep_fallback"] == "1" && strings.Contains(f.Text, saidOfFallback) {
		f.AddHint("without --complete (session.disable_cpu_ep_fallback) the rest is left to the CPU, and the answer says which nodes those are")
	}
}
