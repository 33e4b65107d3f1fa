//go:build !linux

package cache

import "errors"

func fileSystemOf(string) (fileSystem, error) { return fileSystem{}, errors.ErrUnsupported }

func ownerOf(string) (owner, error) { return owner{}, errors.ErrUnsupported }

func processorVendor() string { return "" }

func watchLimits() string { return "the system's limits" }
