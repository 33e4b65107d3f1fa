package main

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/unixsock"
)

// idleLook is how often it is looked whether anybody needs the daemon, at most.
const idleLook = 5 * time.Second

// untilUnneeded gives a channel that tells why the daemon leaves, when it does: the server accepts nobody any more by then, and may have ended before: after stop, which ends the looking, the reason is there if there is one.
// places are as they were before anybody could know of the daemon: what is removed at once is missed too.
func (p *process) untilUnneeded(places []place, server *unixsock.Server, c *cache.Cache) (left <-chan string, stop func()) {
	told, ended, done := make(chan string, 1), make(chan struct{}), make(chan struct{})
	i := &idler{after: p.idle, clients: server.Connections, came: server.Accepted, idle: c.Idle, places: places}
	go func() {
		defer close(done)
		if p.idle <= 0 {
			return
		}
		tick := time.NewTicker(min(idleLook, max(p.idle/10, 10*time.Millisecond)))
		defer tick.Stop()
		i.since = time.Now()
		for {
			select {
			case <-ended:
				return
			case now := <-tick.C:
				if why := i.look(now); why != "" && server.Leave() {
					told <- why
					return
				}
			}
		}
	}()
	return told, sync.OnceFunc(func() { close(ended); <-done })
}

// idler tells when nobody needs the daemon any more.
type idler struct {
	after   time.Duration
	clients func() int
	came    func() uint64 // clients, ever
	idle    func() bool   // no job, and no lease
	places  []place

	since time.Time // nobody has been seen since
	last  uint64
}

// look gives the reason to leave, "" for none.
func (i *idler) look(now time.Time) string {
	if came := i.came(); i.clients() > 0 || came != i.last {
		i.last, i.since = came, now
		return ""
	}
	for _, p := range i.places {
		if !p.there() && i.idle() {
			return p.path + " is not there any more"
		}
	}
	switch {
	case now.Sub(i.since) < i.after:
		return ""
	case !i.idle():
		i.since = now // what is under way, or held, will bring somebody
		return ""
	}
	return fmt.Sprintf("idle for %v", i.after)
}

// place is a file without which the daemon is of no use to those who come: its socket, and the program, which an upgrade or a
// removal of the package takes away with the worker beside it.
type place struct {
	path string
	info os.FileInfo
}

func placesOf(socket string) []place {
	var out []place
	self, err := os.Executable()
	if err == nil {
		self, err = filepath.EvalSymlinks(self)
	}
	paths := []string{socket}
	if err == nil {
		paths = append(paths, self)
	}
	for _, path := range paths {
		if info, err := os.Stat(path); err == nil { // a socket that systemd made may be elsewhere
			out = append(out, place{path, info})
		}
	}
	return out
}

func (p place) there() bool {
	info, err := os.Stat(p.path)
	return err == nil && os.SameFile(info, p.info)
}
