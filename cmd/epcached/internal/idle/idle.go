// Package idle ends the daemon when it is not needed any more.
package idle

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/epcached/epcached/unixsock"
)

// maxInterval is the longest time between two checks whether the daemon is in use.
const maxInterval = 5 * time.Second

// Watch returns a channel with the reason why the daemon leaves after so long without use, 0 for
// never. By then the server accepts no client, and may have ended before. stop ends the watching; a
// reason, if any, is in the channel then. places are as before any client could know of the daemon,
// so that an immediate removal is noticed too. idle reports that there is no job and no lease.
func Watch(after time.Duration, places []RequiredFile, server *unixsock.Server,
	idle func() bool) (left <-chan string, stop func()) {
	reason := make(chan string, 1)
	if after <= 0 {
		return reason, func() {}
	}
	ended, done := make(chan struct{}), make(chan struct{})
	i := &idler{after: after, server: server, idle: idle, files: places}
	go func() {
		defer close(done)
		tick := time.NewTicker(min(maxInterval, max(after/10, 10*time.Millisecond)))
		defer tick.Stop()
		i.since = time.Now()
		for {
			select {
			case <-ended:
				return
			case now := <-tick.C:
				if why := i.check(now); why != "" && server.StopIfUnused() {
					reason <- why
					return
				}
			}
		}
	}()
	return reason, sync.OnceFunc(func() { close(ended); <-done })
}

type idler struct {
	after  time.Duration
	server *unixsock.Server
	idle   func() bool // no job, and no lease
	files  []RequiredFile

	since   time.Time // the last time a client was seen
	lastUse uint64
}

func (i *idler) check(now time.Time) string {
	if came := i.server.Accepted(); i.server.Connections() > 0 || came != i.lastUse {
		i.lastUse, i.since = came, now
		return ""
	}
	for _, p := range i.files {
		if info, err := os.Stat(p.path); (err != nil || !os.SameFile(info, p.info)) && i.idle() {
			return p.path + " no longer exists"
		}
	}
	switch {
	case now.Sub(i.since) < i.after:
		return ""
	case !i.idle():
		i.since = now // a client will come for the job or the lease
		return ""
	}
	return fmt.Sprintf("idle for %v", i.after)
}

// RequiredFile is a file without which the daemon is of no use to clients: its socket, and the
// program, which an upgrade or removal of the package removes together with the worker beside it.
type RequiredFile struct {
	path string
	info os.FileInfo
}

// RequiredFiles are the socket and the program, as they are now.
func RequiredFiles(socket string) []RequiredFile {
	var out []RequiredFile
	self, _ := os.Executable()
	self, _ = filepath.EvalSymlinks(self) // "" after an error, which is not there
	for _, path := range []string{socket, self} {
		if info, err := os.Stat(path); err == nil { // a socket that systemd made may be elsewhere
			out = append(out, RequiredFile{path, info})
		}
	}
	return out
}
