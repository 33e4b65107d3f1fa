//go:build linux && (amd64 || arm64)

package conformance

import (
	"bytes"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// watching notes the files that this process creates or changes in directories. Other processes
// write to these too, and the kernel distinguishes them.
type watching struct {
	fd    int
	where string // which directories are watched
	names []string
}

// watch begins. Some containers forbid it; then nothing is noted, and where says so.
func watch(dirs []string) *watching {
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_NONBLOCK|unix.FAN_CLOEXEC|
		unix.FAN_REPORT_DFID_NAME, unix.O_RDONLY)
	w := &watching{fd: fd}
	for _, dir := range dirs {
		if err == nil && unix.FanotifyMark(fd, unix.FAN_MARK_ADD|unix.FAN_MARK_ONLYDIR,
			unix.FAN_CREATE|unix.FAN_MODIFY|unix.FAN_MOVED_TO|unix.FAN_EVENT_ON_CHILD,
			unix.AT_FDCWD, dir) == nil {
			w.where += ", " + dir
		}
	}
	return w
}

// stop returns the files' names.
func (w *watching) stop() []string {
	for buf := make([]byte, 64<<10); ; {
		n, err := unix.Read(w.fd, buf)
		if err != nil || n <= 0 {
			break
		}
		for rest := buf[:n]; len(rest) > 0; {
			event := (*unix.FanotifyEventMetadata)(unsafe.Pointer(&rest[0]))
			if int(event.Pid) == os.Getpid() {
				// a record: a header and a file system's id, a handle of record[12] bytes, a name
				record := rest[event.Metadata_len:event.Event_len]
				name, _, _ := bytes.Cut(record[20+int(record[12]):], []byte{0})
				w.names = append(w.names, string(name))
			}
			rest = rest[event.Event_len:]
		}
	}
	slices.Sort(w.names)
	return slices.Compact(w.names)
}
