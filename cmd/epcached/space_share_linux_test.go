package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// neighbours is a store with a budget for some sixteen builds, of which an ordinary user keeps a
// quarter.
type neighbours struct {
	*inside
	*testing.T
	dir  string
	root *unixsock.Client
}

const greedyUser, modestUser = 65534, 65533

func newNeighbours(t *testing.T) *neighbours {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: only root can connect as another user")
	}
	c := &neighbours{T: t, dir: t.TempDir(),
		inside: serveInside(t, filepath.Join(inMemory(t), "state"), cache.Options{
			Space: store.SpaceOptions{Budget: store.Amount{Bytes: 16 * 80 << 10},
				UserShare: store.Amount{Percent: 25}}})}
	var err error
	c.root, err = c.dial(t)
	require.NoError(t, err)
	t.Cleanup(func() { c.root.Close() })
	return c
}

// take has a user's own model compiled, of some 64 KiB. Where it does not hold the view, the build
// may be evicted.
func (c *neighbours) take(as *unixsock.Client, seed uint64, holds bool) *wire.AcquireReply {
	c.Helper()
	path := filepath.Join(c.dir, "model.onnx")
	require.NoError(c, os.WriteFile(path, compilertest.Dense(seed, 128, 1), 0o600))
	request := forModel(path, &wire.ExecutionProvider{Name: standin.EP})
	request.HoldsView = true
	reply, view, err := as.Acquire(limited(c), request, []*os.File{openFile(c, path)}, nil, nil)
	require.NoError(c, err)
	if holds {
		c.Cleanup(func() { view.Close() })
	} else {
		require.NoError(c, view.Close())
	}
	return reply
}

// has returns the logical bytes of each user's builds.
func (c *neighbours) has(uid string) int64 {
	c.Helper()
	usage, err := unixsock.Ask[wire.UsageReply](limited(c), c.root, &wire.Usage{}, nil)
	require.NoError(c, err)
	for _, u := range usage.Users {
		if u.Name == uid {
			return u.LogicalBytes
		}
	}
	return 0
}

const share = 4 * 80 << 10

func TestAUserAboveItsShareEvictsNoBuildsOfOthers(t *testing.T) {
	c := newNeighbours(t)
	greedy, modest := c.dialAs(t, greedyUser), c.dialAs(t, modestUser)
	for seed := range uint64(3) {
		require.Equal(t, "compiled", c.take(modest, 100+seed, false).Outcome)
	}
	for seed := range uint64(30) {
		c.take(greedy, seed, false)
		c.take(greedy, seed, false) // a hit, for which it pays more than those of the other user
	}
	require.Greater(t, c.has("uid:65534"), int64(2*share), "what nobody else needs may be used")
	for seed := range uint64(3) {
		require.Equal(t, "hit", c.take(modest, 100+seed, false).Outcome)
	}
	_, err := unixsock.Ask[wire.CollectReply](limited(t), c.root, &wire.Collect{}, nil)
	require.NoError(t, err)
	events, err := unixsock.Ask[wire.EventsReply](limited(t), c.root, &wire.Events{}, nil)
	require.NoError(t, err)
	said := false
	for _, e := range events.Events {
		said = said || strings.Contains(e.Text, "uid 65534 has more than its share of 320.0 KiB")
	}
	require.True(t, said, "events say why builds were evicted")
}

func TestAUserWhoHoldsAllItsBuildsTakesNoneFromOthers(t *testing.T) {
	c := newNeighbours(t)
	greedy, modest := c.dialAs(t, greedyUser), c.dialAs(t, modestUser)
	for seed := range uint64(3) {
		c.take(modest, 100+seed, false)
	}
	for seed := range uint64(20) {
		c.take(greedy, seed, true)
	}
	refused := strings.Join(c.take(greedy, 50, true).Warnings, " ")
	require.Contains(t, refused, "not stored: it has ")
	require.Contains(t, refused, "and uid 65534 has ")
	require.Contains(t, refused, "more than its share of 320.0 KiB")
	require.Contains(t, refused, "raise user_share in [space]")
	for seed := range uint64(3) {
		require.Equal(t, "hit", c.take(modest, 100+seed, false).Outcome)
	}
}

func TestPinsOfAUserAreWithinItsShare(t *testing.T) {
	c := newNeighbours(t)
	greedy := c.dialAs(t, greedyUser)
	pin := func(as *unixsock.Client, build string) error {
		_, err := unixsock.Ask[wire.ChangeReply](limited(t), as,
			&wire.Pin{Entries: []string{build}}, nil)
		return err
	}
	var builds []string
	for seed := range uint64(6) {
		builds = append(builds, c.take(greedy, seed, true).Build)
	}
	var err error
	pinned := 0
	for _, build := range builds {
		if err = pin(greedy, build); err != nil {
			break
		}
		pinned++
	}
	require.ErrorIs(t, err, unixsock.ErrNoSpace)
	require.ErrorContains(t, err, "uid 65534 has pinned ")
	require.ErrorContains(t, err, "of at most 320.0 KiB (its share of the budget)")
	var told *unixsock.Error
	require.ErrorAs(t, err, &told)
	require.Contains(t, told.Hint, "user_share in [space]")
	require.Equal(t, 4, pinned)
	require.NoError(t, pin(greedy, builds[0]), "it is pinned already")
	_, err = unixsock.Ask[wire.ChangeReply](limited(t), greedy, &wire.Unpin{Entries: builds[:1]},
		nil)
	require.NoError(t, err)
	require.NoError(t, pin(greedy, builds[5]))
	require.NoError(t, pin(c.root, builds[0]), "administrators are not bound")
}
