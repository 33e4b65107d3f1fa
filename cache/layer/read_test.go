package layer

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/portable"
)

// A card is used for requests for its own models and execution providers only, because a key may be
// limited to these.
func TestACardAnswersForItsOwnProvidersAndModels(t *testing.T) {
	record := identity.Record{Version: 1, Model: cas.Digest{1}, Group: []cas.Digest{{2}},
		EPs: []identity.RecordEP{{Name: "QNNExecutionProvider"}}}
	for want, change := range map[string]func(*portable.Config){
		"":                       func(*portable.Config) {},
		"another model":          func(c *portable.Config) { c.Members[1].ModelDigest[0] = 9 },
		"other execution provid": func(c *portable.Config) { c.EPs[0].Name = "OtherEP" },
	} {
		c := &portable.Config{ModelDigest: portable.Hash{1},
			Files: []portable.File{{Name: "a.onnx", Size: 1}, {Name: "b.onnx", Size: 1}},
			Graph: "a.onnx",
			EPs:   []portable.EP{{Name: "QNNExecutionProvider"}}, Members: []portable.Member{
				{ModelDigest: portable.Hash{1}, Graph: "a.onnx", Alone: true},
				{ModelDigest: portable.Hash{2}, Graph: "b.onnx", Alone: true}}}
		change(c)
		b, _, err := buildOf(&portable.Card{Config: c}, &portable.Predicate{},
			portable.RequestOf(record.Encode()), "")
		if want == "" {
			require.NoError(t, err)
			require.Len(t, b.Members, 2)
		} else {
			require.ErrorContains(t, err, want)
		}
	}
}
