package upkeep

import (
	"cmp"
	"fmt"
	"strings"
	"time"
)

// RebuildOptions bound the compiles that no request waits for.
type RebuildOptions struct {
	Off      bool
	Jobs     int     // at the same time; 0: 1
	CPUShare float64 // seconds of processor time per second and job; 0: 0.5
	Window   string  // local time of day, "22:00-06:00"; "": always
}

// Limits are RebuildOptions with the defaults filled in.
type Limits struct {
	RebuildOptions
	window window
}

// Limits checks the options.
func (o RebuildOptions) Limits() (Limits, error) {
	l := Limits{RebuildOptions: o}
	l.Jobs, l.CPUShare = cmp.Or(o.Jobs, 1), cmp.Or(o.CPUShare, 0.5)
	if l.Jobs < 0 || !(l.CPUShare > 0) {
		return l, fmt.Errorf("rebuilds: %d jobs with a share of %v of the processor: both have to be "+
			"above zero", o.Jobs, o.CPUShare)
	}
	var err error
	l.window, err = parseWindow(o.Window)
	return l, err
}

// window is a time of day: from begin until end, over midnight where end is not after begin. The
// zero value is always.
type window struct {
	begin, end time.Duration // since midnight, by the clock on the wall
}

func parseWindow(text string) (window, error) {
	if text == "" {
		return window{}, nil
	}
	from, to, ok := strings.Cut(text, "-")
	begin, err := timeOfDay(from)
	if err == nil && ok {
		var end time.Duration
		if end, err = timeOfDay(to); err == nil {
			return window{begin, end}, nil
		}
	}
	return window{}, fmt.Errorf("rebuilds: window %q is not of the form 22:00-06:00", text)
}

func timeOfDay(text string) (time.Duration, error) {
	t, err := time.Parse("15:04", strings.TrimSpace(text))
	if err != nil {
		return 0, err
	}
	return time.Duration(t.Hour())*time.Hour + time.Duration(t.Minute())*time.Minute, nil
}

// opens says how long it is until the window is open; 0: it is. Days that are longer or shorter
// because the clocks were changed are taken as the clocks show them.
func (w window) opens(now time.Time) time.Duration {
	if w.begin == w.end {
		return 0
	}
	clock := time.Duration(now.Hour()*3600+now.Minute()*60+now.Second()) * time.Second
	open := clock >= w.begin && clock < w.end
	if w.end < w.begin {
		open = clock >= w.begin || clock < w.end
	}
	if open {
		return 0
	}
	y, m, d := now.Date()
	begin := time.Date(y, m, d, 0, int(w.begin/time.Minute), 0, 0, now.Location())
	if !begin.After(now) {
		begin = time.Date(y, m, d+1, begin.Hour(), begin.Minute(), 0, 0, now.Location())
	}
	return max(begin.Sub(now), time.Second)
}
