//go:build race

package cache

// underRace: the race detector makes everything ten times slower.
const underRace = true
