package main

import (
	"context"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock"
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
			return nil, exit.Failing("read", arg, err)
		}
		entries[i] = entry
	}
	return entries, nil
}

// asGiven has an error speak of entries as they were given: of a model's file the daemon knows the digest only.
func asGiven(err error, args, entries []string) error {
	var e *unixsock.Error
	if !errors.As(err, &e) {
		return err
	}
	own := *e
	for i, entry := range entries {
		if entry != args[i] {
			own.Text = strings.ReplaceAll(own.Text, strconv.Quote(entry), strconv.Quote(args[i]))
		}
	}
	return &own
}
