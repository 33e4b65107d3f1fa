package main

import (
	"fmt"
	"io"
)

// How fast epcached takes in, beside those that find anything twice: programs
// that people use, and the bare chunk stores of this comparison, which do nothing
// but cut, hash and write; and beside least, which is what the machine can do.
var (
	programs    = []string{"restic-off", "restic", "borg-none", "borg-64k", "casync"}
	chunkStores = []string{"fastcdc-8k", "fastcdc-64k", "gear-64k"}
)

// takeInGoals: x the fastest program, and GB/s.
const (
	takeInGoal   = 3
	takeInGBGoal = 1.2
)

// printAgainst tells what the rows of take-in come to, as far as they were measured in this run.
func printAgainst(to io.Writer, all map[string]figures) {
	own, ok := all["epcached"]
	if !ok {
		return
	}
	fmt.Fprintf(to, "\ntake in: epcached %.2f GB/s (goal %.1f)\n", own.speed(), takeInGBGoal)
	for _, kind := range []struct {
		what  string
		names []string
		goal  string
	}{
		{"the fastest deduplicating program", programs, fmt.Sprintf(" (goal %d)", takeInGoal)},
		{"the fastest bare chunk store", chunkStores, ""},
		{"what only reads, hashes and writes", []string{"least"}, ""},
	} {
		name, best := fastest(kind.names, all)
		if name != "" {
			fmt.Fprintf(to, "  %.2f x %s, %s, %.2f GB/s%s\n", own.speed()/best, kind.what, name,
				best, kind.goal)
		}
	}
}

// fastest returns which of the named methods takes in fastest; no name: none was measured.
func fastest(names []string, all map[string]figures) (name string, best float64) {
	for _, one := range names {
		if f, ok := all[one]; ok && f.speed() > best {
			name, best = one, f.speed()
		}
	}
	return name, best
}
