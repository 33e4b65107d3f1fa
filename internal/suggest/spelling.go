// Package suggest finds the known name that is closest to an unknown one.
package suggest

import "iter"

// Closest gives the known name that is at most two letters away and not another word altogether, "" if there is none; of equally near
// ones the first in the order of the alphabet.
func Closest(name string, known iter.Seq[string]) string {
	best, least := "", 0
	for k := range known {
		d := distance(name, k)
		if d < 3 && 3*d < len(k) && (best == "" || d < least || d == least && k < best) {
			best, least = k, d
		}
	}
	return best
}

// distance counts the letters that must be added, left out or replaced to make b of a. Long names are of no interest.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			step := diagonal
			if a[i] != b[j] {
				step++
			}
			diagonal = row[j+1]
			row[j+1] = min(step, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
