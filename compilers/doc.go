// Package compilers compiles ONNX models with an execution provider (EP) and judges what came out, without ever loading vendor code into the
// calling process.
//
// A [Compiler] answers five questions: which devices a runtime has (Probe), which SDK and hardware a build made here is for (Fingerprint), what a
// model compiles to (Compile), whether a compiled graph loads (Check), and what the EP says of a stored compatibility string (Compatibility).
// [ORT] is the real one: each call starts one worker process (cmd/epcached-ort), which loads the user's libonnxruntime and EP libraries and talks
// through two descriptors (package dialogue). Package standin is an implementation for tests that needs no runtime at all.
//
// What callers may rely on:
//
//   - All methods may be called from several goroutines at once. Each call ends when its context ends, and by then the worker and every process
//     of its group are gone.
//   - A crash, a hang or a flood of the vendor's code is an error value: [ExitError], [ErrTimeout], [ErrCPU], [ErrMemory], [ErrOutput]. What ORT refuses is a
//     [RefusedError] with ORT's own code and text.
//   - Compile reports only files that are complete: regular files in the job's folder, at least one EPContext node in the graph. A graph that
//     holds no EPContext node is a [NoNodesError].
//   - Workers have their working directory, home and temporary files in the job's folder, write nowhere else, read only what they need, have no
//     network, and leave no process behind: as far as the kernel can keep them so, which [ORT.Sandbox] tells ([SandboxOptions] says more).
//
// [Find] reads a folder as pip, a virtual environment or an administrator leaves it, and gives the [Runtime] that every call needs; [EPByName] gives
// what is known in advance about an EP (its options, its library's name). Start reading at [ORT.Compile].
package compilers
