package cache

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/workspace"
)

// A request for one model of a group does not bring the others, so a build of it alone must not
// replace the group's.
func TestGroupIsNotRecompiledFromOneMember(t *testing.T) {
	b := rebuilding(t, func(o *Options) {
		o.KeepSource = build.KeepNone
		o.Policies = map[string]request.Policy{"": {MaxAge: time.Hour, MeasureGain: new(bool)}}
	})
	group := b.acquire(b.group(1, 2))
	b.age()
	require.Equal(t, group.Build.ID, b.acquire(b.request(b.model(1))).Build.ID)
	b.waitForRebuilds()
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
	require.Len(t, b.acquire(b.group(1, 2)).Members, 2)
}

func TestOneModelIsNotTheSameAsItsGroup(t *testing.T) {
	b := newBench(t)
	group := b.acquire(b.group(1, 2))
	_, err := b.cache.keptSources.RequestWith(context.Background(), b.request(b.model(1)),
		group.Build)
	require.ErrorIs(t, err, workspace.ErrNoSource)
	whole, err := b.cache.keptSources.RequestWith(context.Background(), b.group(1, 2), group.Build)
	require.NoError(t, err)
	whole.Close()
}
