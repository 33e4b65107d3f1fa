package cas

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What is worked is processor time of those who work, and of nobody else.
func TestWorkIsProcessorTime(t *testing.T) {
	const some = 20 * time.Millisecond
	var w Waits
	begun, wake, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	wait := w.Begin()
	go func() {
		defer close(ended)
		done := w.Work()
		defer done()
		inner := w.Work()
		require.True(t, w.Working())
		close(begun)
		<-wake // works at nothing
		for asleep := w.Spent(); w.Spent() < asleep+some; {
		}
		inner()
	}()
	<-begun
	require.False(t, w.Working())
	time.Sleep(5 * some)
	require.Less(t, wait.Worked(0), some, "of what who works waits itself nothing counts")
	close(wake)
	<-ended
	worked, until := wait.Worked(0), w.Spent()
	require.GreaterOrEqual(t, worked, some)
	for end := time.Now().Add(some); time.Now().Before(end); { // work of somebody else
	}
	require.Equal(t, until, w.Spent())
	wait.End(wait.Wall(), worked)
	w.Begin().End(1, 1) // a shorter one
	wall, most := w.Longest()
	require.Greater(t, wall, 5*some)
	require.Equal(t, worked, most)
	require.False(t, (*Waits)(nil).Working())
	(*Waits)(nil).Work()()
	(*Waits)(nil).Begin().End(1, 1)
}
