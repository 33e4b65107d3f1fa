package doctor

import (
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/daemon"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock"
)

// Under sudo, HOME may be that of another user.
func TestDoctorNamesASocketThatIsDenied(t *testing.T) {
	home := t.TempDir()
	for _, name := range []string{unixsock.SocketVariable, "XDG_RUNTIME_DIR", "XDG_STATE_HOME"} {
		t.Setenv(name, "")
	}
	t.Setenv("PATH", home)
	t.Setenv("HOME", filepath.Join(home, "other"))
	socket := unixsock.UserSocket()
	require.NoError(t, os.Mkdir(filepath.Join(home, "other"), 0))
	for dir := home; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		require.NoError(t, os.Chmod(dir, 0o755))
	}
	if os.Getuid() == 0 {
		asNobody(t)
	}
	f := &findings{side: "client"}
	f.notConnected(t.Context(), &cli.Call{}, nil, fs.ErrPermission)
	require.Len(t, f.List, 1)
	require.Equal(t, "this user may not connect to "+socket+": a directory above it may not be "+
		"entered",
		f.List[0].Text)
	require.Contains(t, f.List[0].Hint, "another user's, as under sudo")
	_, err := (&daemon.Finder{Socket: socket}).Connect(t.Context())
	require.Equal(t, exit.NotAllowed, exit.Code(err))
	require.Equal(t, []string{"for the reason: epcachectl doctor"}, exit.Hints(err))
}

// asNobody takes root's rights from this test's thread until the test ends.
func asNobody(t *testing.T) {
	runtime.LockOSThread()
	set := func(real, effective uintptr) {
		_, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, real, effective, 0)
		require.Zero(t, errno)
	}
	set(65534, 65534)
	t.Cleanup(func() {
		set(0, 0)
		runtime.UnlockOSThread()
	})
}
