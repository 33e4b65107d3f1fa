//go:build !race

package cache

const underRace = false
