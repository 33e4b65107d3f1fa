//go:build linux && (amd64 || arm64)

package main

import (
	"errors"
	"reflect"
	"slices"

	"github.com/epcached/epcached/compilers/dialogue"
)

// standBy makes ready what every compile with these libraries begins with, and waits for the one that this process is to do. It has no model
// before, and does nothing that could tell one compile from another.
func (j *job) standBy() error {
	if err := j.open(); err != nil {
		return err
	}
	if err := j.phase(dialogue.PhaseRegistering); err != nil {
		return err
	}
	if err := j.registerAll(); err != nil {
		return err
	}
	next, err := dialogue.ReadRequest(j.in)
	if err != nil {
		return err // nobody needs it any more
	}
	same := func(a, b dialogue.EP) bool {
		return a.Name == b.Name && a.Library == b.Library && reflect.DeepEqual(a.Devices, b.Devices)
	}
	if next.Do != dialogue.Compile || next.ORTLibrary != j.req.ORTLibrary || !slices.EqualFunc(next.EPs, j.req.EPs, same) {
		return errors.New("this worker stood by for a compile with other libraries")
	}
	j.req = next
	return nil
}
