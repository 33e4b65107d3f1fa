//go:build !race

package crashfs

// Stride is by how much a test that stops at one step after another goes on. With the race detector
// each try takes several times as long and finds no more than the detector does in some of them;
// make test runs these tests without it, too, at every step.
const Stride = 1
