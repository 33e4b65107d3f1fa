package main

import (
	"fmt"
	"sync"
	"time"

	"github.com/epcached/epcached/unixsock/wire"
)

// phases shows how far the models of a call are: on a terminal a line with a bar for each, renewed several times a
// second; else nothing, or with --progress a line for each change of phase.
type phases struct {
	print *printer
	plain bool
	total int
	start time.Time

	mu       sync.Mutex
	finished int
	running  []*running // in the order in which they were first heard of
	stop     chan struct{}
	stopped  sync.WaitGroup
}

// running is a model that is not done.
type running struct {
	name string
	last *wire.Progress
	at   time.Time
}

func newPhases(p *printer, plain bool, total int) *phases {
	s := &phases{print: p, plain: plain, total: total, start: time.Now(), stop: make(chan struct{})}
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
			s.print.progress(s.lines(time.Now()))
		}
	}
}

func (s *phases) phase(name string, p *wire.Progress) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.find(name)
	if r == nil {
		r = &running{name: name}
		s.running = append(s.running, r)
	}
	if s.plain && r.last.GetPhase() != p.GetPhase() {
		fmt.Fprintf(s.print.err, "epcachectl: %s %s%s\n", printable(p.GetPhase()), printable(name), told(p))
	}
	r.last, r.at = p, time.Now()
}

func (s *phases) find(name string) *running {
	for _, r := range s.running {
		if r.name == name {
			return r
		}
	}
	return nil
}

// told is what a line that stays says of a phase that begins.
func told(p *wire.Progress) string {
	text := ""
	if more := detail(p); more != "" {
		text = " " + more
	}
	if usual := estimated(p); usual > 0 {
		text += ", about " + whole(usual) + " in all"
	}
	return text
}

func detail(p *wire.Progress) string {
	text := ""
	switch {
	case p.GetTotalBytes() > 0:
		text = byteSize(p.GetDoneBytes()) + " of " + byteSize(p.GetTotalBytes())
	case p.GetDetail() != "":
		text = printable(p.GetDetail())
	}
	if n := p.GetWaiting(); n > 1 {
		if text != "" {
			text += ", "
		}
		text += fmt.Sprintf("%d wait for it", n)
	}
	if text == "" {
		return ""
	}
	return "(" + text + ")"
}

func (s *phases) done(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.finished++
	for i, r := range s.running {
		if r.name == name {
			s.running = append(s.running[:i], s.running[i+1:]...)
			return
		}
	}
}

// lines is what stands on the terminal.
func (s *phases) lines(now time.Time) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var lines []string
	for _, r := range s.running {
		lines = append(lines, bar(r.name, r.last, now.Sub(r.at)))
	}
	if len(lines) == 0 {
		lines = append(lines, "asking  "+whole(now.Sub(s.start)))
	}
	if s.total > 1 {
		lines = append(lines, fmt.Sprintf("%d of %d done  %s", s.finished, s.total, whole(now.Sub(s.start))))
	}
	return lines
}

func (s *phases) end() {
	close(s.stop)
	s.stopped.Wait()
	s.print.clear()
}
