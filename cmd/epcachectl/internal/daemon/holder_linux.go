package daemon

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// holder is the process that listens at a socket, as far as the kernel tells it: it does so of one that is stopped as well.
type holder struct {
	path    string
	pid     int
	stopped bool // by a signal, or by a debugger
}

// holderOf asks who listens at the first of the paths where anybody does.
func holderOf(paths []string) (h holder, ok bool) {
	for _, path := range paths {
		conn, err := net.DialTimeout("unix", path, 50*time.Millisecond) // a full queue would have it wait
		if err != nil {
			continue
		}
		h = holder{path: path}
		if raw, err := conn.(*net.UnixConn).SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { // without an answer nothing is known
				if peer, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
					h.pid = int(peer.Pid) // 0 for one of another pid namespace
				}
			})
		}
		_ = conn.Close() // nothing was said
		h.stopped = stopped(h.pid)
		return h, true
	}
	return holder{}, false
}

func stopped(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	rest := bytes.TrimLeft(text[bytes.LastIndexByte(text, ')')+1:], " ") // the name before it may hold anything
	return len(rest) > 0 && (rest[0] == 'T' || rest[0] == 't')
}
