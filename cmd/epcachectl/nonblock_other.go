//go:build !unix

package main

// nonBlocking is for FIFOs, which this system has none of.
const nonBlocking = 0
