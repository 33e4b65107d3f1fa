//go:build !linux

package compilers

// instructionSets: there is no daemon on these systems yet.
func instructionSets() []string { return nil }
