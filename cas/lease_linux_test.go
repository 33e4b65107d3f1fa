package cas

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Opening a blob does not fail while another process has a lease on it to find out whether it is in
// use.
func TestBlobOpensDuringAnInUseQuery(t *testing.T) {
	s := openStore(t, Options{})
	b := random(5000)
	d := mustPut(t, s, b)
	f, err := os.Open(s.path(d))
	require.NoError(t, err)
	lease := func() error {
		_, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
		return err
	}
	if err := lease(); err != nil {
		t.Skipf("SKIPPED: this file system gives no leases: %v", err)
	}
	_, err = os.OpenFile(s.path(d), os.O_RDONLY|unix.O_NONBLOCK, 0)
	require.ErrorIs(t, err, unix.EAGAIN)
	back := time.AfterFunc(20*time.Millisecond, func() { _ = f.Close() })
	defer back.Stop()
	require.Equal(t, b, contents(t, s, d))
}
