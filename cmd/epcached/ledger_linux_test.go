package main

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// entry is what one application knows of one model: what the daemon has acknowledged, and what it
// was just doing when the daemon died.
type entry struct {
	path   string
	stored bool              // there is a build that is served
	files  map[string]string // of that build: digests by name
	build  string            // its key
	open   bool              // a change was asked for and not answered: it may have happened or not
	held   []lease           // what the application still reads from
}

// change is something that an application asks for.
type change func(*entry, testing.TB, *unixsock.Client) error

func (e *entry) get(t testing.TB, c *unixsock.Client) error {
	return e.take(t, c, !e.stored)
}

func (e *entry) refresh(t testing.TB, c *unixsock.Client) error {
	return e.take(t, c, true, refresh)
}

// take asks for the model. open says whether that can change what is stored.
func (e *entry) take(t testing.TB, c *unixsock.Client, open bool,
	how ...func(*wire.Acquire)) error {
	e.open = e.open || open
	a, err := e.acquire(t, c, how...)
	if err != nil {
		return err
	}
	e.acknowledged(a)
	return a.wrong()
}

func (e *entry) acknowledged(a lease) {
	e.open, e.stored, e.files, e.build = false, true, a.names(), a.Build
	e.held = append(e.held, a)
}

// acquire is tryGet with the descriptors left to the entry.
func (e *entry) acquire(t testing.TB, c *unixsock.Client, how ...func(*wire.Acquire)) (lease,
	error) {
	f, err := os.Open(e.path)
	if err != nil {
		return lease{}, err
	}
	defer f.Close()
	request := forModel(e.path)
	for _, h := range how {
		h(request)
	}
	reply, view, err := c.Acquire(limited(t), request, []*os.File{f}, nil, nil)
	return lease{reply, view}, err
}

func (e *entry) remove(t testing.TB, c *unixsock.Client) error {
	if e.build == "" {
		return nil
	}
	e.open = true
	_, err := unixsock.Ask[wire.ChangeReply](limited(t), c,
		&wire.Remove{Entries: []string{e.build}}, nil)
	return e.gone(err)
}

func (e *entry) invalidate(t testing.TB, c *unixsock.Client) error {
	if e.build == "" {
		return nil
	}
	e.open = true
	_, err := unixsock.Ask[wire.ChangeReply](limited(t), c,
		&wire.Invalidate{Entries: []string{e.build}}, nil)
	return e.gone(err)
}

func (e *entry) gone(err error) error {
	if err != nil && !errors.Is(err, unixsock.ErrNotFound) {
		return err
	}
	e.open, e.stored = false, false
	return nil
}

// changes is what applications do in the tests of crashes, some of it more often.
var changes = []change{
	(*entry).get, (*entry).get, (*entry).get, (*entry).get,
	(*entry).refresh, (*entry).refresh, (*entry).remove, (*entry).invalidate,
}

// work asks for one thing after the other until the daemon dies. An error that is not its death is
// returned.
func (e *entry) work(t testing.TB, d *epcached, random *rand.Rand) error {
	c, err := d.tryDial()
	if err != nil {
		return nil // it died before it could answer
	}
	defer c.Close()
	for {
		err := changes[random.IntN(len(changes))](e, t, c)
		switch {
		case errors.Is(err, unixsock.ErrConnectionLost):
			return nil
		case err != nil:
			return fmt.Errorf("%s: %w", filepath.Base(e.path), err)
		}
		e.letGo(8)
	}
}

// letGo closes the oldest views until no more than so many are held.
func (e *entry) letGo(keep int) {
	for len(e.held) > keep {
		e.held[0].view.Close()
		e.held = e.held[1:]
	}
}

// requireKept requires of a daemon that came back what its predecessor has acknowledged.
func (e *entry) requireKept(t testing.TB, c *unixsock.Client) {
	t.Helper()
	for _, a := range e.held {
		require.NoError(t, a.wrong(), "who holds a view goes on with it")
	}
	a, err := e.acquire(t, c, onMissFail)
	if errors.Is(err, unixsock.ErrNotFound) && (e.open || !e.stored) {
		e.open, e.stored = false, false
		return
	}
	require.NoError(t, err, "%s was acknowledged", filepath.Base(e.path))
	require.True(t, e.open || e.stored, "%s was removed, and that was acknowledged",
		filepath.Base(e.path))
	require.Equal(t, "hit", a.Outcome)
	require.NoError(t, a.wrong())
	if !e.open {
		require.Equal(t, e.files, a.names())
	}
	e.acknowledged(a)
}

// requireClean requires that nothing is left of what was never acknowledged, nor of what was let
// go.
func (d *epcached) requireClean(t testing.TB) {
	t.Helper()
	left := d.leftovers(t)
	for end := time.Now().Add(patience / 3); left != "" &&
		time.Now().Before(end); left = d.leftovers(t) {
		time.Sleep(10 * pollEvery) // the sweep is in the background
	}
	require.Empty(t, left, "leftovers")
}

// leftovers names what the store holds and no build needs.
func (d *epcached) leftovers(t testing.TB) string {
	t.Helper()
	needed, builds := make(map[string]bool), d.list()
	for _, b := range builds {
		for _, f := range b.Files {
			needed[f.Digest] = true
		}
	}
	var extra []string
	err := filepath.WalkDir(d.state, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return nil // it has just gone
		}
		name, err := filepath.Rel(d.state, path)
		if err != nil {
			return err
		}
		switch top, rest, _ := strings.Cut(name, "/"); top {
		case "objects":
			digest := strings.ReplaceAll(rest, "/", "")
			if !entry.IsDir() && !needed[digest] && !needed[filepath.Base(rest)] {
				extra = append(extra, name)
			}
		case "staging", "quarantine":
			if rest != "" && (top == "staging" || !entry.IsDir()) {
				extra = append(extra, name)
			}
		}
		if strings.Contains(name, ".new") || strings.Contains(name, ".tmp") ||
			(strings.Contains(name, "incoming/")) {
			extra = append(extra, name)
		}
		return nil
	})
	require.NoError(t, err)
	views, err := filepath.Glob(filepath.Join(d.state, "views", "*", "*"))
	require.NoError(t, err)
	if len(views) > len(builds) {
		extra = append(extra, fmt.Sprintf("%d views of %d builds", len(views), len(builds)))
	}
	return strings.Join(extra, ", ")
}
