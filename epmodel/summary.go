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
func (m *Model) NodeSummary(limit int) string { return nodeSummary(m.Nodes, m.OpTypes, limit) }

// UncompiledSummary is NodeSummary of the nodes that are no EPContext nodes.
func (m *Model) UncompiledSummary(limit int) string {
	rest := maps.Clone(m.OpTypes)
	delete(rest, "com.microsoft::EPContext")
	return nodeSummary(m.Nodes-len(m.Contexts), rest, limit)
}

func nodeSummary(nodes int, opTypes map[string]int, limit int) string {
	ops := slices.SortedFunc(maps.Keys(opTypes), func(a, b string) int {
		return cmp.Or(cmp.Compare(opTypes[b], opTypes[a]), cmp.Compare(a, b))
	})
	var parts []string
	for i, op := range ops {
		if i == limit {
			parts = append(parts, fmt.Sprintf("and %d more operators", len(ops)-limit))
			break
		}
		short := strings.TrimPrefix(op, "ai.onnx::")
		parts = append(parts, fmt.Sprintf("%d %s", opTypes[op], short))
	}
	noun := "nodes"
	if nodes == 1 {
		noun = "node"
	}
	if len(parts) == 0 {
		return "0 nodes"
	}
	return fmt.Sprintf("%d %s (%s)", nodes, noun, strings.Join(parts, ", "))
}
