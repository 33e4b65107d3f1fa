package suggest

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestClosest(t *testing.T) {
	known := []string{"soc_model", "soc_mode1", "backend_path", "jobs", "job"}
	for name, want := range map[string]string{
		"soc_modle":             "soc_model", // swapped letters are one mistake
		"soc_modeq":             "soc_mode1", // both are a letter away: the first in order
		"soc-model":             "soc_model",
		"backend_pth":           "backend_path",
		"bakcend_path":          "backend_path",
		"jobz":                  "job", // as near as jobs
		"ojb":                   "job",
		"cat":                   "", // another word
		"":                      "",
		strings.Repeat("a", 65): "",
	} {
		require.Equal(t, want, Closest(name, slices.Values(known)), name)
	}
	require.Empty(t, Closest("name", slices.Values([]string{})))
}

func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"abc", "", 3}, {"abc", "abc", 0}, {"kitten", "sitting", 3},
		{"ab", "ba", 1}, {"sohw", "show", 1}, {"flaw", "lawn", 2}} {
		require.Equal(t, c.want, distance(c.a, c.b), c)
	}
}
