//go:build !linux

package main

// repeat does nothing here: the exit status says the signal's number.
func (s childStatus) repeat() {}
