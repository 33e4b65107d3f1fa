package identity

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/epcached/epcached/index"
)

// Shapes tells for people what the free dimensions of a build's model were fixed at, "batch=1, sequence=128", by which variants of one model
// are told apart; "" where there are none.
func Shapes(b *index.Build) string {
	var record struct {
		Named       map[string]int64 `json:"free_dimensions"`
		Denotations map[string]int64 `json:"free_dimensions_by_denotation"`
	}
	if json.Unmarshal([]byte(b.RecordJSON), &record) != nil {
		return "" // of a build that a later epcached made, perhaps
	}
	var out []string
	for _, all := range []map[string]int64{record.Named, record.Denotations} {
		for _, name := range slices.Sorted(maps.Keys(all)) {
			out = append(out, fmt.Sprintf("%s=%d", name, all[name]))
		}
	}
	return strings.Join(out, ", ")
}
