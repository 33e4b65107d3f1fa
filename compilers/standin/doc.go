// Package standin is a compiler for tests of other packages: it needs no ONNX Runtime, starts no process, and misbehaves on request.
//
// It "compiles" a model into a valid EPContext graph and one context binary that holds the model's bytes, so that equal requests give equal
// artefacts and different ones differ. What an SDK would decide comes from its library file, which [Library] writes: change that file, and
// fingerprints, compatibility strings and verdicts change as after an SDK update. A misbehaviour is the EP option "fault"; see [Fault].
//
// [New] makes one; [Library] writes a folder that compilers.Find accepts as a runtime.
package standin
