package unixsock

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/unixsock/wire"
)

func TestDescriptorsThatAreRefused(t *testing.T) {
	dir := t.TempDir()
	file, fifo := filepath.Join(dir, "file"), filepath.Join(dir, "fifo")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	at := func(path string, flags int) func() (int, error) {
		return func() (int, error) { return unix.Open(path, flags|unix.O_CLOEXEC, 0) }
	}
	cases := map[string]struct {
		open func() (int, error)
		says string // "" is accepted
	}{
		"file":               {at(file, unix.O_RDONLY), ""},
		"file for both":      {at(file, unix.O_RDWR), ""},
		"file, non-blocking": {at(file, unix.O_RDONLY|unix.O_NONBLOCK), ""},
		"memory file": {func() (int,
			error) {
			return unix.MemfdCreate("m", unix.MFD_CLOEXEC)
		}, ""},
		"file for writing":    {at(file, unix.O_WRONLY), "opened for writing only"},
		"file for nothing":    {at(file, unix.O_PATH), "O_PATH"},
		"directory":           {at(dir, unix.O_RDONLY), "is a directory"},
		"directory by O_PATH": {at(dir, unix.O_PATH), "O_PATH"},
		"FIFO":                {at(fifo, unix.O_RDONLY|unix.O_NONBLOCK), "is a pipe or FIFO"},
		"character device":    {at("/dev/zero", unix.O_RDONLY), "is a character device"},
		"socket": {func() (int,
			error) {
			return unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		}, "is a socket"},
		"epoll, which has no kind": {func() (int,
			error) {
			return unix.EpollCreate1(unix.EPOLL_CLOEXEC)
		}, "not a regular file"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			s := serve(t, &standIn{}, limits{})
			fd, err := tc.open()
			require.NoError(t, err)
			f := os.NewFile(uintptr(fd), name)
			defer f.Close()
			c := dial(t, s)
			_, view, err := c.Acquire(background(t), acquireModel(), []*os.File{f}, nil, nil)
			if tc.says == "" {
				require.NoError(t, err)
				require.NoError(t, view.Close())
				return
			}
			require.ErrorIs(t, err, ErrBadRequest)
			require.Contains(t, err.Error(), tc.says)
			require.Contains(t, err.Error(), `model "model.onnx"`)
			require.Zero(t, s.backend.calls.Load(), "the backend never saw it")
		})
	}
}

// The error names the descriptor as the request does, whatever the descriptor is for.
// Go's runtime asks a file system whether a non-blocking file can be polled, and holds up all
// goroutines meanwhile.
func TestDescriptorsAreNotPolled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	slow, err := checkFD(fd)
	require.NoError(t, err)
	require.False(t, slow)
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	require.NoError(t, err)
	require.Zero(t, flags&unix.O_NONBLOCK)
	require.NoError(t, unix.Close(fd))
}

func TestRefusedDescriptorIsNamed(t *testing.T) {
	c := dial(t, serve(t, &standIn{}, limits{}))
	dir, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer dir.Close()
	cases := map[string]func(a *wire.Acquire, fd uint32){
		`model "model.onnx"`: func(a *wire.Acquire, fd uint32) { a.Model.Fd = fd },
		`external data "sub/w.bin"`: func(a *wire.Acquire, fd uint32) {
			a.Model.External = []*wire.ExternalFile{{Location: "sub/w.bin", Fd: fd}}
		},
		`file of option "backend_path"`: func(a *wire.Acquire,
			fd uint32) {
			a.Eps[0].OptionFds = map[string]uint32{"backend_path": fd}
		},
		`library of "SomeEP"`: func(a *wire.Acquire, fd uint32) {
			a.Runtime = &wire.Runtime{EpLibraries: []*wire.EpLibrary{{Ep: "SomeEP", Fd: &fd}}}
		},
		`library beside that of "SomeEP"`: func(a *wire.Acquire, fd uint32) {
			a.Runtime = &wire.Runtime{EpLibraries: []*wire.EpLibrary{{Ep: "SomeEP",
				Beside: []*wire.ExternalFile{{Location: "x.so", Fd: fd}}}}}
		},
		`descriptor 1 is a directory`: func(*wire.Acquire, uint32) {},
	}
	for says, name := range cases {
		for what, fd := range map[string]uint32{"a directory": 1, "beyond the end": 2,
			"far beyond": 1<<32 - 1} {
			a := acquireModel()
			name(a, fd)
			_, _, err := c.Acquire(background(t), a, []*os.File{modelFile(t), dir}, nil, nil)
			require.ErrorIs(t, err, ErrBadRequest, what)
			require.ErrorContains(t, err, says)
		}
	}
	_, _, err = c.Acquire(background(t), &wire.Acquire{}, nil, nil, nil)
	require.ErrorContains(t, err, "no model")
}
