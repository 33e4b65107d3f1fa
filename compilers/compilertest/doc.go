// Package compilertest builds the worker and a plugin EP for tests, and finds the real runtimes
// that tests may use.
package compilertest
