package main

import (
	"context"
	"io"
	"os"

	"github.com/epcached/epcached/cas"
)

func sumOf(ctx context.Context, r io.ReaderAt, off, n int64) ([32]byte, error) {
	d, err := cas.Sum(ctx, r, off, n)
	return [32]byte(d), err
}

// entryOf lets a model's path stand for its entry: a file of that name is meant before a key or name in the store.
func entryOf(ctx context.Context, arg string) (string, error) {
	if info, err := os.Stat(arg); err != nil || !info.Mode().IsRegular() {
		return arg, nil
	}
	m, err := openModel(arg)
	if err != nil {
		return "", err
	}
	defer m.close()
	d, err := m.digest(ctx)
	return d.String(), err
}

func entriesOf(ctx context.Context, args []string) ([]string, error) {
	entries := make([]string, len(args))
	for i, arg := range args {
		entry, err := entryOf(ctx, arg)
		if err != nil {
			return nil, verbError{"read", arg, err}
		}
		entries[i] = entry
	}
	return entries, nil
}
