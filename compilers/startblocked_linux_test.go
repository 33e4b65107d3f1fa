package compilers

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/workerproto"
)

// While the kernel keeps a process from starting, further ones fail, with the reason, and do not
// block. When it starts processes again so do they.
func TestABlockedStartBlocksNoOther(t *testing.T) {
	o := NewORT(ORTOptions{Worker: "/bin/true"})
	defer func() { require.NoError(t, o.Close()) }()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	require.NoError(t, err)
	defer null.Close()
	start := func() (*child, error) {
		return o.startChild(workerproto.Launch{}, []*os.File{null, null, null}, isolation{})
	}
	answers := make(chan struct{})
	o.launcher.calls <- func() { <-answers } // as a process that closes a file of FUSE
	o.startTimeout = time.Millisecond
	_, err = start()
	require.ErrorIs(t, err, errStartBlocked)
	close(answers)
	o.startTimeout = time.Minute
	c, err := start()
	require.NoError(t, err)
	c.wait()
	require.Zero(t, c.reap().Status)
}
