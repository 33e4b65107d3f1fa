package cache

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// The requests that the kernel sends to a FUSE server, as far as they are answered here.
const (
	fuseLookup  = 1
	fuseForget  = 2
	fuseGetattr = 3
	fuseOpen    = 14
	fuseRead    = 15
	fuseStatfs  = 17
	fuseInit    = 26
)

// unansweredFile is an open file of a file system with a server that answers everything but reads.
// The server is this process; it ends with the test.
func unansweredFile(t *testing.T, name string) *os.File {
	if os.Getuid() != 0 {
		t.Skip("NOT TESTED: only root can mount a file system that never answers")
	}
	device, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("NOT TESTED: there is no FUSE here: %v", err)
	}
	dir := t.TempDir()
	data := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", device)
	require.NoError(t, unix.Mount("unanswered", dir, "fuse", unix.MS_NOSUID|unix.MS_NODEV, data))
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	require.NoError(t, err)
	served := make(chan struct{})
	t.Cleanup(func() {
		_, _ = unix.Write(stop, []byte{1, 0, 0, 0, 0, 0, 0, 0})
		<-served
		_ = unix.Close(device) // ends what waits for an answer
		_ = unix.Close(stop)
		require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH))
	})
	go func() {
		defer close(served)
		serveUnanswered(device, stop)
	}()
	// Not os.Open, which asks this process whether it can poll the file while it holds up all
	// goroutines.
	fd, err := unix.Open(filepath.Join(dir, name), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), name)
	t.Cleanup(func() { f.Close() })
	return f
}

func serveUnanswered(device, stop int) {
	request := make([]byte, 1<<20)
	for {
		ready := []unix.PollFd{{Fd: int32(device), Events: unix.POLLIN}, {Fd: int32(stop),
			Events: unix.POLLIN}}
		if _, err := unix.Poll(ready, -1); err != nil && err != unix.EINTR ||
			ready[1].Revents != 0 {
			return
		}
		if ready[0].Revents == 0 {
			continue
		}
		n, err := unix.Read(device, request)
		if err != nil || n < 40 {
			continue
		}
		opcode, unique := binary.LittleEndian.Uint32(request[4:]), request[8:16]
		node := binary.LittleEndian.Uint64(request[16:])
		var body []byte
		var errno int32
		switch opcode {
		case fuseRead, fuseForget:
			continue
		case fuseInit:
			body = make([]byte, 64)
			copy(body, request[40:44]) // the major version
			binary.LittleEndian.PutUint32(body[4:], 31)
			binary.LittleEndian.PutUint32(body[20:], 1<<17) // the longest write
		case fuseLookup:
			body = make([]byte, 40, 128)
			binary.LittleEndian.PutUint64(body, 2)
			body = append(body, fuseAttributes(2)...)
		case fuseGetattr:
			body = append(make([]byte, 16), fuseAttributes(node)...)
		case fuseOpen:
			body = make([]byte, 16)
		case fuseStatfs:
			body = make([]byte, 80)
		default:
			errno = -int32(unix.ENOSYS)
		}
		head := make([]byte, 16)
		binary.LittleEndian.PutUint32(head, uint32(16+len(body)))
		binary.LittleEndian.PutUint32(head[4:], uint32(errno))
		copy(head[8:], unique)
		_, _ = unix.Write(device, append(head, body...))
	}
}

// fuseAttributes are of the root, node 1, or of the file.
func fuseAttributes(node uint64) []byte {
	b := make([]byte, 88)
	binary.LittleEndian.PutUint64(b, node)
	mode, size := uint32(unix.S_IFDIR|0o755), uint64(0)
	if node != 1 {
		mode, size = unix.S_IFREG|0o644, 1<<20
	}
	binary.LittleEndian.PutUint64(b[8:], size)
	binary.LittleEndian.PutUint32(b[60:], mode)
	binary.LittleEndian.PutUint32(b[64:], 1) // links
	return b
}
