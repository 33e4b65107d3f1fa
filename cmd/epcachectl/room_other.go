//go:build !linux && !darwin

package main

import "errors"

func mayWrite(string) error { return nil }

func freeBytes(string) (int64, error) { return 0, errors.ErrUnsupported }
