// Epcached-ort is the worker of epcached: it loads a user's ONNX Runtime and EP libraries, does one
// job, and exits.
//
// epcached starts it as "epcached-ort prepare LIMITS". That process puts the limits on itself,
// keeps itself to the files and the system calls of a worker (Landlock, seccomp), and starts
// "epcached-ort work", which inherits all of it, reads one request from descriptor 3 and answers on
// descriptor 4 (package workerproto). Then it waits, and ends what the worker left. It is of no use
// by hand, and keeps nothing between jobs.
//
// Vendor code runs in this process and may do anything to it. So the worker promises little: a
// result record means that the job was done, and everything else is a failure. The daemon checks
// its output. Standard output and standard error both go to standard error.
package main
