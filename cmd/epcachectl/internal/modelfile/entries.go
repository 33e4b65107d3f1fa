package modelfile

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock"
)

// Entry lets a model's path stand for its entry: a file of that name is meant before a key or name in the store.
func Entry(ctx context.Context, arg string) (string, error) {
	if info, err := os.Stat(arg); err != nil || !info.Mode().IsRegular() {
		return arg, nil
	}
	m, err := Open(arg)
	if err != nil {
		return "", err
	}
	defer m.Close()
	d, err := m.Digest(ctx)
	return d.String(), err
}

// Entries returns the entries that arguments stand for.
func Entries(ctx context.Context, args []string) ([]string, error) {
	entries := make([]string, len(args))
	for i, arg := range args {
		entry, err := Entry(ctx, arg)
		if err != nil {
			return nil, exit.Failing("read", arg, err)
		}
		entries[i] = entry
	}
	return entries, nil
}

// AsGiven has an error speak of entries as they were given: of a model's file the daemon knows the digest only.
func AsGiven(err error, args, entries []string) error {
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
