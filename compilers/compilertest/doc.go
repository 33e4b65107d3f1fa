// Package compilertest tests implementations of compilers.Compiler: [Suite] holds what every one of them promises. It also builds the worker and
// finds the real runtimes that tests may use.
package compilertest
