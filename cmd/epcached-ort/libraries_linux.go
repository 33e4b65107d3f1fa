//go:build linux && (amd64 || arm64)

package main

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/internal/sharedlib"
)

const (
	// linkDirectory is in the worker's private directory, which is its working directory.
	linkDirectory = "libraries"
	libraryPath   = "LD_LIBRARY_PATH"
)

// withLibraries returns the environment of a worker that loads these plugins. Vendors' code opens
// libraries of its package by name, which the loader looks up in the directories that the
// environment named when the process started. Best effort: only plugins without run paths need it,
// and ONNX Runtime reports the libraries that are missing.
func withLibraries(plugins []string) []string {
	here, _ := os.Getwd() // the daemon has made it
	dir := filepath.Join(here, linkDirectory)
	for _, plugin := range plugins {
		for name, path := range sharedlib.Links(plugin) {
			_ = os.MkdirAll(dir, 0o700)
			_ = os.Symlink(path, filepath.Join(dir, name)) // another plugin may have the name
		}
	}
	if _, err := os.Stat(dir); err == nil {
		own := os.Getenv(libraryPath)
		_ = os.Setenv(libraryPath, strings.TrimPrefix(own+":"+dir, ":"))
	}
	return os.Environ()
}

// registerLibrary registers a plugin, after the libraries that it needs and that the loader would
// not find.
func (j *job) registerLibrary(name, plugin string) error {
	for _, path := range sharedlib.Preloads(plugin) {
		if err := ort.Preload(path); err != nil {
			return err
		}
	}
	return j.env.Register(name, plugin)
}
