package main

import (
	"bufio"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// figures are what one method comes to.
type figures struct {
	Stored  int64   // bytes
	TakeIn  float64 // seconds
	CPU     float64 // seconds of processor time while taking in, children included
	Restore float64 // seconds; 0: not measured
	Peak    int64   // bytes of memory, of the largest process
	Bytes   int64   // logical
	Each    []int64 // stored bytes of each artefact; nil where a method cannot tell
}

// method stores the corpus below a directory, and gives it back.
type method struct {
	// what is there before; nil: nothing
	prepare func(c corpus, store string) error
	takeIn  func(c corpus, store string) (stored []int64, err error) // of each artefact, or one sum
	// nil: there is nothing to restore
	restore func(c corpus, store, into string) error
}

// order is that of the table.
var order = []string{
	"bound", "least", "whole", "store", "epcached", "epcached-hashed", "fastcdc-8k",
	"fastcdc-64k", "gear-64k",
	"restic-off", "restic", "borg-none", "borg-64k", "casync",
}

func methods() map[string]method {
	return map[string]method{
		"bound": {takeIn: bound},
		"least": {takeIn: leastIn},
		"whole": {nil, wholeIn, wholeOut},
		"store": {nil, storeIn, storeOut},
		"epcached": {nil, extentsIn, func(c corpus, store, into string) error {
			return extentsOut(c, store, into, true)
		}},
		"epcached-shared": {publish, sharedIn, func(c corpus, store, into string) error {
			return extentsOut(c, store, into, true)
		}},
		"epcached-hashed": {nil, extentsIn, func(c corpus, store, into string) error {
			return extentsOut(c, store, into, false)
		}},
		"fastcdc-8k":  chunked(fastCDC(8 << 10)),
		"fastcdc-64k": chunked(fastCDC(64 << 10)),
		"gear-64k":    chunked(gear64),
		"restic-off":  restic("off"),
		"restic":      restic("auto"),
		"borg-none":   borg(),
		"borg-64k":    borg("--chunker-params", "buzhash,14,18,16,4095"),
		"casync":      {nil, casyncIn, casyncOut},
	}
}

func (m method) measure(c corpus, work string) (figures, error) {
	f := figures{Bytes: c.size()}
	if err := c.warm(); err != nil {
		return f, err
	}
	store, into := filepath.Join(work, "store"), filepath.Join(work, "restored")
	for _, dir := range []string{store, into} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return f, err
		}
	}
	if m.prepare != nil {
		if err := m.prepare(c, store); err != nil {
			return f, err
		}
	}
	unix.Sync() // what others wrote is not to be waited for in here
	cpu, start := processor(), time.Now()
	stored, err := m.takeIn(c, store)
	if err != nil {
		return f, err
	}
	for _, n := range stored {
		f.Stored += n
	}
	if len(stored) == len(c.Artefacts) {
		f.Each = stored
	}
	f.TakeIn, f.CPU = time.Since(start).Seconds(), processor()-cpu
	if f.Peak, err = peak(); err != nil {
		return f, err
	}
	if m.restore == nil {
		return f, nil
	}
	unix.Sync()
	start = time.Now()
	if err := m.restore(c, store, into); err != nil {
		return f, err
	}
	f.Restore = time.Since(start).Seconds()
	return f, c.same(into)
}

// speed is that of taking in, in GB/s.
func (f figures) speed() float64 { return float64(f.Bytes) / 1e9 / f.TakeIn }

// columns are those of the table, a line for each method as soon as it is done.
const columns = "%-16s %10s %15s %8s %13s %7s %13s %9s\n"

func (f figures) print(name string, logical, bound int64) {
	share, restore := "", ""
	if bound > 0 {
		share = fmt.Sprintf("%.4f", float64(f.Stored)/float64(bound))
	}
	if f.Restore > 0 {
		restore = fmt.Sprintf("%.2f", float64(logical)/1e9/f.Restore)
	}
	fmt.Printf(columns, name, fmt.Sprintf("%.2f", float64(f.Stored)/1e6),
		fmt.Sprintf("%.3f", float64(logical)/float64(f.Stored)), share,
		fmt.Sprintf("%.2f", f.speed()), fmt.Sprintf("%.1f", f.CPU), restore,
		fmt.Sprintf("%.0f", float64(f.Peak)/(1<<20)))
}

// processor returns the seconds that this process and its children have used.
func processor() (seconds float64) {
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		if unix.Getrusage(who, &u) == nil {
			seconds += time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
		}
	}
	return seconds
}

// peak returns the most memory that this process, or one of its children, has had.
func peak() (int64, error) {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &u); err != nil {
		return 0, err
	}
	if u.Maxrss > 0 {
		// the tools are children, and this process does nothing beside them
		return u.Maxrss << 10, nil
	}
	in, err := os.Open("/proc/self/status")
	if err != nil {
		return 0, err
	}
	defer in.Close()
	for s := bufio.NewScanner(in); s.Scan(); {
		if rest, found := strings.CutPrefix(s.Text(), "VmHWM:"); found {
			var kib int64
			_, err := fmt.Sscanf(rest, "%d kB", &kib)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("no VmHWM in /proc/self/status")
}

// sizeOf returns the bytes of all files below dir, as the one sum.
func sizeOf(dir string) ([]int64, error) {
	n := int64(0)
	err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			n += info.Size()
		}
		return err
	})
	return []int64{n}, err
}
