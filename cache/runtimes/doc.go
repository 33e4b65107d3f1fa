// Package runtimes knows which ONNX Runtimes and execution provider libraries there are, and on which
// machine.
//
// Start reading at Machine.
package runtimes
