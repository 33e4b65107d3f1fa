// Package suggest finds the known name that is closest to an unknown one.
package suggest

import (
	"iter"
	"slices"
)

// Closest returns the known name at an edit distance of at most two that is not too different for
// its length, "" if there is none. Of equally near ones it returns the alphabetically first.
func Closest(name string, known iter.Seq[string]) string {
	best, least := "", 0
	for k := range known {
		d := distance(name, k)
		if d < 3 && 3*d <= len(k) && (best == "" || d < least || d == least && k < best) {
			best, least = k, d
		}
	}
	return best
}

// Hint asks whether the closest known name, with the prefix, was meant. It returns "" if no name is
// close.
func Hint(prefix, name string, known []string) string {
	if closest := Closest(name, slices.Values(known)); closest != "" {
		return "did you mean " + prefix + closest + "?"
	}
	return ""
}

// distance returns the edit distance: the letters that must be added, removed, replaced or swapped
// with their neighbour to turn a into b. It does not compare long names.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	row, last, before := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		row, last, before = before, row, last
		row[0] = i + 1
		for j := range len(b) {
			step := last[j]
			if a[i] != b[j] {
				step++
			}
			row[j+1] = min(step, row[j]+1, last[j+1]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
	}
	return row[len(b)]
}
