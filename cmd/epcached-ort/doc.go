// Epcached-ort is the worker of epcached: it loads a user's ONNX Runtime and EP libraries, does one
// job, and exits.
//
// epcached starts it as "epcached-ort prepare LIMITS". That process applies the limits to itself,
// restricts itself to the files and system calls of a worker (Landlock, seccomp), and starts
// "epcached-ort work", which inherits the restrictions, reads one request from descriptor 3 and
// answers on descriptor 4 (package workerproto). Then it waits, and ends processes that the worker
// left. It is not for use by hand, and keeps no state between jobs.
//
// Vendor code runs in this process and may do anything to it. So only a result record means that
// the job succeeded; everything else is a failure. The daemon checks its output. Standard output
// and standard error both go to standard error.
package main
