//go:build !linux

package compilers

import (
	"context"
	"errors"

	"github.com/epcached/epcached/compilers/dialogue"
)

// host has nothing to give to workers, for there are none.
type host struct{}

func newHost(ORTOptions) *host { return nil }

type tried struct{}

func (o *ORT) work(context.Context, dialogue.Request, string, <-chan struct{}, func(string)) (answer, error) {
	return answer{}, errors.ErrUnsupported
}

// Sandbox implements Sandboxed.
func (o *ORT) Sandbox(context.Context) ([]Measure, error) { return nil, errors.ErrUnsupported }
