package cache

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/forms"
)

// What is packed for nobody is given up for who waits for the turn, however much is left of it, and is begun anew when that one has had it.
func TestWhatIsPackedForNobodyGivesUpItsTurn(t *testing.T) {
	b := newBench(t)
	builds, files := b.similar(2)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	kept := b.cache.forms
	var comes sync.Once
	had := make(chan struct{})
	begun := 0
	err := b.cache.sharing.inTurn(ctx, func(gate forms.Gate) error {
		if begun++; begun == 2 {
			select {
			case <-had:
			default:
				assert.Fail(t, "begun anew before the other one had the turn")
			}
		}
		freed, err := b.cache.packBuildWith(ctx, builds[1].ID, packWhen{when: PackAlways}, func(ctx context.Context) error {
			comes.Do(func() {
				go func() {
					leave, err := kept.TakeTurn(ctx)
					if assert.NoError(t, err) {
						close(had)
						leave()
					}
				}()
				for !kept.TurnWanted() {
					time.Sleep(time.Millisecond)
				}
			})
			return gate(ctx)
		})
		if begun == 1 {
			assert.Zero(t, freed)
			assert.False(t, kept.OnlyPacked(large(builds[1])))
		}
		return err
	})
	require.NoError(t, err)
	require.Equal(t, 2, begun)
	require.True(t, kept.OnlyPacked(large(builds[1])))
	a := b.acquire(b.variant(2))
	require.Equal(t, files[1], b.read(a))
	require.NoError(t, a.View.Close())
}
