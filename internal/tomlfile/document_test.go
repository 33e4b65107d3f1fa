package tomlfile_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/internal/tomlfile"
)

func TestValuesHaveTheirPlaces(t *testing.T) {
	d, err := tomlfile.Parse("f.toml", []byte(`a = 1
list = ["x",
  "y"]
[t.u]
v = { w = [1, { z = 2 }] }
[[n]]
  k = 1
[[n]]
  k = 2
[n.in]
  deep = 3
`))
	require.NoError(t, err)
	for _, c := range []struct {
		path         []string
		line, column int
	}{
		{[]string{"a"}, 1, 1},
		{[]string{"list", "1"}, 3, 3},
		{[]string{"t", "u", "v", "w", "1", "z"}, 5, 17},
		{[]string{"n", "0"}, 6, 3},
		{[]string{"n", "1"}, 8, 3},
		{[]string{"n", "1", "k"}, 9, 3},
		{[]string{"n", "1", "in", "deep"}, 11, 3},
		{[]string{"n", "2"}, 0, 0},
	} {
		require.Equal(t, tomlfile.Position{Line: c.line, Column: c.column},
			d.Root().In(c.path...).Position(), "%v", c.path)
	}
}

func TestMistakesAreInTheOrderOfTheFile(t *testing.T) {
	d, err := tomlfile.Parse("f.toml", []byte("a = 1\n'b c' = [1, 2]\n"))
	require.NoError(t, err)
	require.NoError(t, d.Err())
	d.Root().In("b c", "1").Errorf("no")
	d.Root().In("a").Errorf("no either")
	require.EqualError(t, d.Err(), `f.toml:1:1: field "a": no either
f.toml:2:13: field "b c[2]": no`)
	var one *tomlfile.Error
	require.ErrorAs(t, d.Err(), &one)
	require.Equal(t, "a", one.Field)
}
