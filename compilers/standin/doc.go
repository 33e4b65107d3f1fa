// Package standin is a compiler for tests of other packages: it needs no ONNX Runtime, starts no
// process, and misbehaves on request.
//
// It "compiles" a model into a valid EPContext graph and one context binary that holds the model's
// bytes, so that equal requests give equal artefacts and different ones differ. The library file,
// which [Library] writes, stands for the SDK: a change to it changes fingerprints, compatibility
// strings and verdicts as an SDK update would. The EP option "fault" makes it misbehave; see
// [Fault].
//
// [New] makes one; [Library] writes a directory that compilers.Find accepts as a runtime.
package standin
