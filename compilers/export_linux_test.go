package compilers

import (
	"context"
	"errors"
)

// StampsThatTell returns the stamps of what is in a directory, once each change would show in them.
func StampsThatTell(ctx context.Context, dir string) (stamps any, err error) {
	then, err := stampsSettled(ctx, dir, nil)
	if then == nil && err == nil {
		err = errors.New("the clock of files stands still")
	}
	return then, err
}
