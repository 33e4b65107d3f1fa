//go:build !linux

package compilers

import (
	"context"
	"errors"

	"github.com/epcached/epcached/compilers/dialogue"
)

func (o *ORT) work(context.Context, dialogue.Request, string, <-chan struct{}, func(string)) (answer, error) {
	return answer{}, errors.ErrUnsupported
}
