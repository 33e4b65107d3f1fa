package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// onlyEP takes the execution provider and device that this machine has, where the call names none and there is one that can
// compile; it says so. Where there are several it lists them: which is meant nobody can guess.
func (r *request) onlyEP(ctx context.Context, c *unixsock.Client, a *app) error {
	if len(r.eps) > 0 {
		return nil
	}
	probe := &wire.Probe{}
	if r.runtime != "" {
		dir, err := filepath.Abs(r.runtime)
		if err != nil {
			return err
		}
		probe.Runtime = &wire.Runtime{Directory: dir}
	}
	reply, err := c.Probe(ctx, probe)
	if err != nil {
		return err
	}
	able := ableEPs(reply.GetRuntimes())
	switch len(able) {
	case 0:
		return exit.Hint(errors.New("no --ep, and no execution provider here can compile"), "see why: epcachectl probe")
	case 1:
		a.Print.Note("no --ep: " + term.Printable(able[0]) + ", which is all that can compile here")
		if err := r.addEP(able[0]); err != nil {
			return err
		}
		return r.complete()
	}
	return exit.Usage(exit.Hint(fmt.Errorf("no --ep: which execution provider shall compile? here are %s", strings.Join(term.Printables(able), ", ")),
		"name one, such as --ep "+term.Printable(able[0])))
}

// ableEPs lists the devices that models can be compiled for, as --ep names them.
func ableEPs(runtimes []*wire.RuntimeFacts) []string {
	var able []string
	for _, rt := range runtimes {
		for _, ep := range rt.GetEps() {
			for _, d := range ep.GetDevices() {
				name := ep.GetName() + ":" + d.GetType()
				if ep.GetError() == "" && d.GetError() == "" && !slices.Contains(able, name) {
					able = append(able, name)
				}
			}
		}
	}
	return able
}
