//go:build !linux

package cache

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/epcached/epcached/cas"
)

func unwritable(*os.File) error { return errors.ErrUnsupported }

func unlinked(*os.File) (bool, error) { return false, errors.ErrUnsupported }

func stampSettled(*os.File) (cas.Stamp, error) { return cas.Stamp{}, errors.ErrUnsupported }

func (c *Cache) stagePut(context.Context, io.ReaderAt, *os.File, string, int64) (cas.Hashed, error) {
	return cas.Hashed{}, errors.ErrUnsupported
}

func fits(string, int64, int64) error { return errors.ErrUnsupported }

func fitsBeside(string, int64, int64, int64) error { return errors.ErrUnsupported }

const spareOfLess = 0
