package main

import (
	"fmt"
	"sync"
	"time"

	"github.com/epcached/epcached/unixsock/wire"
)

// phases shows how far the models of a call are: on a terminal one line, renewed several times a second; else
// nothing, or with --progress a line for each change of phase.
type phases struct {
	print *printer
	plain bool
	total int
	start time.Time

	mu       sync.Mutex
	finished int
	current  string // the model that reported last
	last     *wire.Progress
	lastOf   map[string]string // model -> phase that was printed
	stop     chan struct{}
	stopped  sync.WaitGroup
}

func newPhases(p *printer, plain bool, total int) *phases {
	s := &phases{print: p, plain: plain, total: total, start: time.Now(), lastOf: make(map[string]string), stop: make(chan struct{})}
	if p.terminal && !plain {
		s.stopped.Go(s.renew)
	}
	return s
}

func (s *phases) renew() {
	tick := time.NewTicker(200 * time.Millisecond) // a hit is answered before the first, and shows nothing
	defer tick.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-tick.C:
			s.mu.Lock()
			text := s.text()
			s.mu.Unlock()
			s.print.progress("%s", text)
		}
	}
}

func (s *phases) phase(path string, p *wire.Progress) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.current, s.last = path, p
	if s.plain && s.lastOf[path] != p.GetPhase() {
		s.lastOf[path] = p.GetPhase()
		fmt.Fprintf(s.print.err, "epcachectl: %s %s%s\n", printable(p.GetPhase()), printable(path), detail(p))
	}
}

func detail(p *wire.Progress) string {
	switch {
	case p.GetTotalBytes() > 0:
		return fmt.Sprintf(" (%s of %s)", byteSize(p.GetDoneBytes()), byteSize(p.GetTotalBytes()))
	case p.GetDetail() != "":
		return " (" + printable(p.GetDetail()) + ")"
	}
	return ""
}

func (s *phases) done(string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.finished++
}

func (s *phases) text() string {
	text := "asking"
	if s.last != nil {
		text = printable(s.last.GetPhase()) + " " + printable(s.current) + detail(s.last)
	}
	text += fmt.Sprintf("  %ds", int(time.Since(s.start).Seconds()))
	if s.total > 1 {
		text = fmt.Sprintf("%d of %d done, %s", s.finished, s.total, text)
	}
	return text
}

func (s *phases) end() {
	close(s.stop)
	s.stopped.Wait()
	s.print.clear()
}
