package main

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// storeOf returns every file and directory below the state directory that is part of the store,
// with its mode and the digest of its bytes. The database, the journal of events and the lock
// change with each request, and are no part of it.
func storeOf(t testing.TB, state string) map[string]string {
	t.Helper()
	out := make(map[string]string)
	err := filepath.WalkDir(state, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(state, path)
		if err != nil {
			return err
		}
		switch name {
		case "index.db", "journal", "lock":
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		digest := ""
		if info.Mode().IsRegular() {
			if digest, err = fileDigest(path); err != nil {
				return err
			}
		}
		out[name] = fmt.Sprint(info.Mode(), " ", digest)
		return nil
	})
	require.NoError(t, err)
	return out
}
