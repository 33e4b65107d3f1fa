// Package ort calls ONNX Runtime's C API without cgo. It is for the worker process alone: it loads
// vendor libraries into the calling process, and importing it makes a program dynamic.
//
// The package covers what the worker needs: open a library, register EP libraries, list devices,
// compile by the compile API, open sessions, run them on tensors, ask for verdicts. Start with
// [Open], which returns an [API].
//
// Every call into C goes through [API.call], which pins each Go pointer, string and array for the
// length of the call. Nothing else in the package turns a Go pointer into an integer. (A conversion
// to uintptr in a helper function, away from the call itself, keeps nothing alive or in place: such
// code survives hundreds of runs and then corrupts memory under concurrency.)
//
// Functions are found by their position in ORT's function tables, which only ever grow at the end.
// functions.go lists each with its name and the version that it came with; a test compares the
// positions with the public header by way of a C compiler. GetApi returns the same table for all
// versions, so each call is checked against the version that the library states.
//
// Methods may be called from several goroutines; objects are not to be used after Release. It works
// on Linux, on amd64 and arm64.
package ort
