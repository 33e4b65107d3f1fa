package epmodel

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// NodeSummary says in one line what a model computes, for messages such as "no EPContext node: ...": the number of nodes and the
// most frequent operators, at most limit of them.
func (m *Model) NodeSummary(limit int) string {
	ops := slices.SortedFunc(maps.Keys(m.OpTypes), func(a, b string) int {
		return cmp.Or(cmp.Compare(m.OpTypes[b], m.OpTypes[a]), cmp.Compare(a, b))
	})
	var parts []string
	for i, op := range ops {
		if i == limit {
			parts = append(parts, fmt.Sprintf("and %d more operators", len(ops)-limit))
			break
		}
		short := strings.TrimPrefix(op, "ai.onnx::")
		parts = append(parts, fmt.Sprintf("%d %s", m.OpTypes[op], short))
	}
	noun := "nodes"
	if m.Nodes == 1 {
		noun = "node"
	}
	if len(parts) == 0 {
		return "0 nodes"
	}
	return fmt.Sprintf("%d %s (%s)", m.Nodes, noun, strings.Join(parts, ", "))
}
