//go:build !unix

package main

import "os"

func passedOn() []os.Signal { return []os.Signal{os.Interrupt} }

// sentToBoth: a console sends its signals to all of its programs.
func sentToBoth(os.Signal) bool { return true }

func childStatusOf(state *os.ProcessState) childStatus { return childStatus{code: state.ExitCode()} }
