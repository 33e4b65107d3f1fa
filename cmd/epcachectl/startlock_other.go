//go:build !linux

package main

import (
	"context"
	"errors"
)

// startLock: the daemon is for Linux.
type startLock struct{}

func lockStart(context.Context, string, func() bool) (*startLock, error) {
	return nil, errors.ErrUnsupported
}

func (*startLock) failed() string { return "" }

func (*startLock) end(string) {}
