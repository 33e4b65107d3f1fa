package index

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFailuresOutliveARestart(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	want := make(map[string][]byte)
	for i := range 3 * scanRows { // several pages
		key := fmt.Sprintf("key %05d", i)
		want[key] = fmt.Appendf(nil, "value %d", i)
		require.NoError(t, x.Failures.Save([]byte(key), want[key]))
	}
	x.Failures.Drop([]byte("key 00007"))
	delete(want, "key 00007")
	for range 2 {
		got, err := x.Failures.All()
		require.NoError(t, err)
		require.Equal(t, want, got)
		closeSound(t, x)
		x = open(t, dir)
	}
	closeSound(t, x)
}
