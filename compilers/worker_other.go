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

func (o *ORT) work(context.Context, dialogue.Request, string, Pace, func(string)) (answer, error) {
	return answer{}, errors.ErrUnsupported
}

func (o *ORT) compile(context.Context, dialogue.Request, Job, func(string)) (answer, error) {
	return answer{}, errors.ErrUnsupported
}

// StandBy implements Standing.
func (o *ORT) StandBy(Runtime, []EP, string, string) (*Standby, error) {
	return nil, errors.ErrUnsupported
}

// TakesOpen implements Opener.
func (o *ORT) TakesOpen(Job) bool { return false }

// Sandbox implements Sandboxed.
func (o *ORT) Sandbox(context.Context) ([]Measure, error) { return nil, errors.ErrUnsupported }
