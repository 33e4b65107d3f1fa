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

// A panic of bbolt is reported in a plain sentence, and keeps its words for the log.
func TestPanicsOfTheDatabaseBecomeErrors(t *testing.T) {
	err := recoverFaults(func() error { panic("assertion failed: Page expected to be: 23") })
	require.EqualError(t, &BrokenError{err},
		"index.db cannot be used: its pages contradict each other")
	require.Equal(t, "assertion failed: Page expected to be: 23", panicIn(&BrokenError{err}))
}
