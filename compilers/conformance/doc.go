// Package conformance holds an execution provider to ONNX Runtime's guidelines: those for EPContext
// models and those for plugin libraries. Each guideline is a few calls of ONNX Runtime's C API with
// what is expected of them, and a record of what happened.
//
// It loads vendor code into its own process, one guideline in each: use it in a worker
// (cmd/epcached-ort, by compilers.ORT.Conformance). Tests may run it in their own process with an
// EP of their own. It is not safe for concurrent use. Start reading at [Run] and at the rows in
// generation.go.
package conformance
