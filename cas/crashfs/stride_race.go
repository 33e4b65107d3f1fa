//go:build race

package crashfs

// Stride is odd, so that the errors that tests take in turn all come up.
const Stride = 7
