package term

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/epcached/epcached/unixsock/wire"
)

// Phases shows the progress of a call's models: on a terminal a line with a bar for each, which is
// updated several times a second; elsewhere nothing, or with --progress a line for each change of
// phase.
type Phases struct {
	print *Printer
	plain bool
	total int
	Start time.Time
	Waits bool // a queued model counts as done only when its job has ended

	mu       sync.Mutex
	finished map[string]bool // by name, so that a model is counted once
	took     time.Duration   // total time of the compiles that are done
	timed    int             // number of compiles that are done
	running  []*running      // in the order of their first reports
	stop     chan struct{}
	stopped  sync.WaitGroup
}

type running struct {
	name string
	last *wire.Progress
	at   time.Time
}

// NewPhases shows the progress of total models until End is called; plain prints each phase on a
// line of its own.
func NewPhases(p *Printer, plain bool, total int) *Phases {
	s := &Phases{print: p, plain: plain, total: total, Start: time.Now(),
		finished: make(map[string]bool), stop: make(chan struct{})}
	if p.Terminal && !plain {
		s.stopped.Go(s.renew)
	}
	return s
}

func (s *Phases) renew() {
	// a hit is answered before the first tick, and so shows no progress
	tick := time.NewTicker(200 * time.Millisecond)
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

// Phase records a model's progress.
func (s *Phases) Phase(name string, p *wire.Progress) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.find(name)
	if at < 0 {
		at = len(s.running)
		s.running = append(s.running, &running{name: name})
	}
	r := s.running[at]
	if s.plain && r.last.GetPhase() != p.GetPhase() {
		text := detail(p)
		if usual := Milliseconds(p.GetEstimateMs()); usual > 0 {
			text += ", about " + RoundSeconds(usual) + " in all"
		}
		fmt.Fprintf(s.print.Err, "epcachectl: %s\n",
			s.print.clean(p.GetPhase()+" "+Printable(name)+text))
	}
	r.last, r.at = p, time.Now()
}

func (s *Phases) find(name string) int {
	return slices.IndexFunc(s.running, func(r *running) bool { return r.name == name })
}

func detail(p *wire.Progress) string {
	var parts []string
	if p.GetTotalBytes() > 0 {
		parts = append(parts, Bytes(p.GetDoneBytes())+" of "+Bytes(p.GetTotalBytes()))
	}
	if p.GetDetail() != "" {
		parts = append(parts, Printable(p.GetDetail()))
	}
	if n := p.GetWaiting(); n > 1 {
		parts = append(parts, fmt.Sprintf("%d waiting for it", n))
	}
	if len(parts) == 0 {
		return ""
	}
	return " (" + strings.Join(parts, ", ") + ")"
}

// Done records that a model is done, or is queued.
func (s *Phases) Done(name string, queued bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if queued && s.Waits {
		return
	}
	s.finished[name] = true
	if at := s.find(name); at >= 0 {
		if r := s.running[at]; r.last.GetElapsedMs() > 0 {
			s.took += elapsed(r.last, time.Since(r.at))
			s.timed++
		}
		s.running = slices.Delete(s.running, at, at+1)
	}
}

func (s *Phases) lines(now time.Time) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var lines []string
	width := 1000
	if s.print.width != nil {
		width = s.print.width()
	}
	for i, r := range s.running {
		if i == mostBars && len(s.running) > i+1 {
			lines = append(lines, fmt.Sprintf("and %d more", len(s.running)-i))
			break
		}
		lines = append(lines, bar(r.name, r.last, now.Sub(r.at), width))
	}
	if len(lines) == 0 {
		lines = append(lines, "waiting for the daemon  "+RoundSeconds(now.Sub(s.Start)))
	}
	if s.total > 1 {
		line := fmt.Sprintf("%d of %d done  %s", len(s.finished), s.total,
			RoundSeconds(now.Sub(s.Start)))
		if left := s.left(now); left > 0 {
			line += ", about " + RoundSeconds(left) + " left"
		}
		lines = append(lines, line)
	}
	return lines
}

// left estimates the time until all models are done, 0 if no compile time is known. It assumes that
// each compile takes as long as earlier compiles of its model, or as the mean of the others, and
// that as many run at a time as now.
func (s *Phases) left(now time.Time) time.Duration {
	known, sum, parallel := s.timed, s.took, 0
	for _, r := range s.running {
		if usual := Milliseconds(r.last.GetEstimateMs()); usual > 0 {
			sum += usual
			known++
		}
		if r.last.GetPhase() != "queued" {
			parallel++
		}
	}
	if known == 0 {
		return 0
	}
	mean := sum / time.Duration(known)
	left := time.Duration(max(0, s.total-len(s.finished)-len(s.running))) * mean
	for _, r := range s.running {
		usual := Milliseconds(r.last.GetEstimateMs())
		if usual <= 0 {
			usual = mean
		}
		left += max(0, usual-elapsed(r.last, now.Sub(r.at)))
	}
	return left / time.Duration(max(1, parallel))
}

// End stops showing progress, and removes it from the terminal.
func (s *Phases) End() {
	close(s.stop)
	s.stopped.Wait()
	s.print.Clear()
}

const (
	barCells = 20
	mostBars = 8
)

// bar returns the line of a model's progress, which was reported age ago. The line has a bar if the
// progress is known in bytes, builds or files, or if earlier compiles of the model were timed. An
// empty name stands for the call itself. If the terminal is too narrow, the line has no details,
// then half of the bar, then a shortened name; the bar is never cut.
func bar(name string, p *wire.Progress, age time.Duration, width int) string {
	text, cells, more := Printable(p.GetPhase()), barCells, detail(p)
	if name != "" {
		text = fmt.Sprintf("%-9s", text)
	}
	rest := func() string {
		line := ""
		if part, known := doneFraction(p, age); known {
			full := int(part * float64(cells))
			line = "  [" + strings.Repeat("#", full) + strings.Repeat(".", cells-full) + "]"
		}
		return line + "  " + tookOf(p, age) + more
	}
	space := func() int { return width - 1 - ansi.StringWidth(text+rest()) - betweenColumns }
	least := min(ansi.StringWidth(Printable(name)), readable)
	if space() < least {
		more = ""
	}
	if space() < least {
		cells = barCells / 2
	}
	if name != "" {
		text += "  " + Middle(Printable(name), max(space(), 1))
	}
	return text + rest()
}

// doneFraction returns how much of a model's work is done, from 0 to 1, and whether that is known.
// An estimate from earlier compiles stays below 1.
func doneFraction(p *wire.Progress, age time.Duration) (float64, bool) {
	switch {
	case p.GetTotalBytes() > 0:
		return min(max(float64(p.GetDoneBytes())/float64(p.GetTotalBytes()), 0), 1), true
	case p.GetTotal() > 0:
		return min(float64(p.GetDone())/float64(p.GetTotal()), 1), true
	case p.GetEstimateMs() > 0:
		return min(float64(elapsed(p, age))/float64(Milliseconds(p.GetEstimateMs())), 0.95), true
	}
	return 0, false
}

func elapsed(p *wire.Progress, age time.Duration) time.Duration {
	return max(0, Milliseconds(p.GetElapsedMs())+age)
}

func Milliseconds(ms int64) time.Duration { return time.Duration(ms) * time.Millisecond }

func tookOf(p *wire.Progress, age time.Duration) string {
	took, usual := elapsed(p, age), Milliseconds(p.GetEstimateMs())
	switch {
	case usual <= 0:
		return RoundSeconds(took)
	case took > usual:
		return RoundSeconds(took) + ", usually " + RoundSeconds(usual)
	}
	return RoundSeconds(took) + " of about " + RoundSeconds(usual)
}

// RoundSeconds spells a duration in whole seconds.
func RoundSeconds(d time.Duration) string {
	return (d + time.Second/2).Truncate(time.Second).String()
}
