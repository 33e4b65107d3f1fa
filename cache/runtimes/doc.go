// Package runtimes knows which ONNX Runtimes and execution provider libraries there are, on which
// machine, and what they find there.
//
// A Set has the runtimes that the administrator registered and those that clients named. Resolve finds
// the one that a request means. Content is what the files of a runtime were when they were last looked
// at; every use compares their stamps, so that a library that was replaced is never taken for the one
// before. A change is noticed by a watcher as well: the runtime is probed again, and Options.Assessed
// is called.
//
// Files are kept open where their folder's times and the kernel's reports of mounts show that names lead
// to them; elsewhere names are looked up. So each request itself notices a rename or a mount over one.
//
// What the worker finds out (devices, fingerprints, verdicts) is remembered under keys that cover the
// libraries' bytes and the machine: see Remember. Such facts outlive the daemon.
//
// Start reading at Set.
package runtimes
