// Package epmodel reads ONNX models, and the EPContext nodes in them, without loading either.
//
// [Read] walks the protocol buffer through an io.ReaderAt. Weights and context binaries are passed over: their ranges are
// recorded, their bytes never read, so a model of 10 GB costs a few megabytes and a few reads. What it finds is a [Model]:
// the initializers with the place of their bytes, the EPContext nodes with every attribute, metadata, opsets. On that stand
// [Digest], the identity of a model's content; [Model.Sidecars], every file that an artefact refers to; and [Validate], which
// judges an artefact before it is stored or served.
//
// Input is taken as hostile. Whatever the bytes are, functions return, with bounded memory and bounded recursion, and damage is a
// [*FormatError] that names file, offset and field. An error of the file itself (an I/O error) stays what it is, wrapped.
//
// Functions keep no state and may be called at the same time. A *Model is never changed after Read; callers treat it as
// read-only.
//
// Start reading at [Read], then model.go for what comes out and protobuf.go for how bytes are walked.
package epmodel
