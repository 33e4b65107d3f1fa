//go:build linux && (amd64 || arm64)

package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/epcached/epcached/compilers/conformance"
	"github.com/epcached/epcached/compilers/dialogue"
)

// conformance holds the request's EP to a guideline, or finds out what it takes.
func (j *job) conformance() error {
	cwd, err := os.Getwd()
	if err != nil {
		return err
	}
	folder, err := os.MkdirTemp(cwd, "case-")
	if err != nil {
		return err
	}
	subject := conformance.Subject{EP: j.req.EPs[0], Choose: choose, Folder: folder, Tell: j.phase}
	if j.req.Guideline != "" {
		finding, err := conformance.Run(j.env, subject, j.req.Guideline, j.req.Family)
		j.result.Finding = &finding
		return err
	}
	devices, family, err := conformance.Discover(j.env, &subject)
	if logged := j.logged(); err != nil && len(logged) > 0 {
		err = fmt.Errorf("%w; ONNX Runtime logged: %s", err, strings.Join(logged, "; "))
	}
	j.result.EPs = []dialogue.EPResult{described(subject.EP, devices)}
	j.result.Family, j.result.Guidelines = family, conformance.List()
	return err
}
