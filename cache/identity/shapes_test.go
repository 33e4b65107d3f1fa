package identity

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

func TestShapesTellVariantsApart(t *testing.T) {
	for record, want := range map[string]string{
		`{"free_dimensions":{"sequence":128,"batch":1},"free_dimensions_by_denotation":` +
			`{"DATA_CHANNEL":3}}`: "batch=1, sequence=128, DATA_CHANNEL=3",
		`{"free_dimensions":{}}`:              "",
		`{"free_dimensions":{"batch":"one"}}`: "",
		``:                                    "",
	} {
		require.Equal(t, want, DimensionsText(&index.Build{RecordJSON: record}), record)
	}
}
