package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cache"
)

// The simulated week. A store of package cache, with the policy that it has by
// itself, in a directory on the disk; its clock is moved, and all else is real:
//
//   - The day before, from 8:00 on, all artefacts are compiled, one a minute, and put.
//   - Then come seven days. Each hour from 9:00 to 17:00 applications ask for the
//     same third of the artefacts, and let them go: every third one in the order of
//     the corpus. Besides, each day at 13:00 another one is asked for once, a
//     different one each day. The first output each day is compared with the
//     corpus, byte for byte.
//   - Each half hour the store packs what is cold, as the daemon does every ten
//     minutes. Then the bytes are counted that the state directory really takes: the
//     blocks of every file, each once, unpacked copies, views, database and all. The
//     mean is that of all counts of the seven days.
//
// It is run for each of the three thirds.

const (
	weekDays            = 7
	firstHour, lastHour = 9, 17
	oddHour             = 13
	thirds              = 3
	weekGoal            = 1.3 // x the bound, on average
	day                 = 24 * time.Hour
	arrives             = 8 * time.Hour // of the day before
	between             = time.Minute
)

const weekColumns = "%-6s %10s %6s %8s  %-13s  %s\n"

type week struct {
	*standing
	clock time.Duration // since the midnight before the day before
	bound int64
	third int
	seen  map[int]bool // artefacts that were compared today
}

// runWeeks runs the week for each third, and fails if one is above the goal.
func runWeeks(c corpus, work string, bound int64, only int, options cache.Options) error {
	fmt.Printf(
		"\nthe simulated week: bytes really on disk, x the bound of %.2f MB; seven days of the "+
			"same third, and another one each day\n", float64(bound)/1e6)
	fmt.Printf(weekColumns, "third", "all whole", "mean", "highest", "at", "at each day's end")
	var failed []error
	for third := range thirds {
		if only > 0 && only != third+1 {
			continue
		}
		dir, err := os.MkdirTemp(work, "week-")
		if err != nil {
			return err
		}
		err = runWeek(c, dir, bound, third, options)
		if err = errors.Join(err, os.RemoveAll(dir)); err != nil {
			failed = append(failed, fmt.Errorf("third %d: %w", third+1, err))
		}
	}
	return errors.Join(failed...)
}

func runWeek(c corpus, dir string, bound int64, third int, options cache.Options) (err error) {
	later := new(atomic.Int64)
	s, err := openStanding(c, filepath.Join(dir, "store"), later, options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.cache.Close()) }()
	w := &week{standing: s, bound: bound, third: third, seen: make(map[int]bool)}
	arrival, err := w.arrive()
	if err != nil {
		return err
	}
	var mean, highest float64
	var when string
	var ends []string
	for d := 1; d <= weekDays; d++ {
		var last float64
		clear(w.seen)
		for half := range 48 {
			w.until(time.Duration(d)*day + time.Duration(half)*time.Hour/2)
			if err := w.apply(d, half); err != nil {
				return fmt.Errorf("day %d, %d:00: %w", d, half/2, err)
			}
			if last, err = w.measure(); err != nil {
				return err
			}
			mean += last
			if last > highest {
				highest, when = last, fmt.Sprintf("day %d, %d:00", d, half/2)
			}
		}
		fmt.Fprintf(os.Stderr,
			"space: third %d, day %d of %d: %.3f x the bound, at most %.3f so far\n", third+1, d,
			weekDays, last, highest)
		ends = append(ends, fmt.Sprintf("%.3f", last))
	}
	mean /= weekDays * 48
	fmt.Printf(weekColumns, fmt.Sprint(third+1), fmt.Sprintf("%.3f", arrival),
		fmt.Sprintf("%.3f", mean), fmt.Sprintf("%.3f", highest), when, strings.Join(ends, " "))
	if mean > weekGoal {
		return fmt.Errorf("%.3f x the bound on average, more than %.1f", mean, weekGoal)
	}
	return nil
}

// arrive has all artefacts come, and tells what they take before any is packed.
func (w *week) arrive() (float64, error) {
	w.clock = arrives
	for i := range w.corpus.Artefacts {
		for _, one := range w.artefact(i) {
			if err := w.put(one); err != nil {
				return 0, err
			}
		}
		w.until(w.clock + between)
	}
	first, err := onDisk(w.dir)
	if err != nil {
		return 0, err
	}
	for w.clock < day {
		w.until(w.clock + time.Hour/2)
		if _, err := w.measure(); err != nil {
			return 0, err
		}
	}
	return float64(first) / float64(w.bound), nil
}

// until moves the clock to an hour.
func (w *week) until(clock time.Duration) {
	w.forward(clock - w.clock)
	w.clock = clock
}

// apply has the applications of that half hour ask for what they use.
func (w *week) apply(d, half int) error {
	for _, i := range w.asked(d, half) {
		for _, one := range w.artefact(i) {
			err := w.served(one, func(path func(fileInfo) string) error {
				if w.seen[i] {
					return nil
				}
				return w.compare(one, path)
			})
			if err != nil {
				return err
			}
		}
		w.seen[i] = true
	}
	return nil
}

func (w *week) compare(one onebuild, path func(fileInfo) string) error {
	a, b := make([]byte, 1<<20), make([]byte, 1<<20)
	for _, f := range one.files {
		if err := sameFile(w.corpus.path(f), path(f), a, b); err != nil {
			return fmt.Errorf("%s: %w", f.Path, err)
		}
	}
	return nil
}

// asked lists the artefacts that are used in a half hour of a day.
func (w *week) asked(d, half int) (out []int) {
	h := half / 2
	if half%2 > 0 || h < firstHour || h > lastHour {
		return nil
	}
	var others []int
	for i := range w.corpus.Artefacts {
		if i%thirds == w.third {
			out = append(out, i)
		} else {
			others = append(others, i)
		}
	}
	if h == oddHour {
		out = append(out, others[d*5%len(others)]) // all over the corpus
	}
	return out
}

// measure packs what is cold, and counts.
func (w *week) measure() (float64, error) {
	w.cache.Store.Packer().RequestSweep()
	w.cache.Store.Packer().Sweep(context.Background())
	n, err := onDisk(w.dir)
	return float64(n) / float64(w.bound), err
}
