package store

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

// A quota may be filled to the byte, also when nothing more may go.
func TestAQuotaIsFilledToTheByte(t *testing.T) {
	s, r := newLedger(), &Reservation{user: 1}
	s.reserved.ByUser[1] = 100 // what it stores just now
	now := &usageNow{Bounds: Bounds{User: 1000},
		users: map[uint32]index.UserSpace{1: {LogicalBytes: 500}}}
	_, err := s.admitUser(now, r, 400, 400)
	require.NoError(t, err)
	_, err = s.admitUser(now, &Reservation{user: 2}, 1000, 1000)
	require.NoError(t, err, "somebody else's")
	final, err := s.admitUser(now, r, 401, 401)
	require.ErrorContains(t, err,
		"it has 401 B, and uid 1 has 600 B of at most 1000 B, "+
			"and would have 1001 B with this build")
	require.False(t, final)
	now.mayGo = 1
	_, err = s.admitUser(now, r, 401, 401)
	require.NoError(t, err, "room is made")
	final, err = s.admitUser(now, &Reservation{user: 2}, 1001, 1001)
	require.Error(t, err)
	require.True(t, final, "it never fits")
}

// A reservation that lacks space above the floor causes an eviction, although the floor itself is
// kept; within the budget one more build needs none.
func TestReservationForTheFloorEvicts(t *testing.T) {
	s, now := newLedger(), &Account{Disk: 500}
	above := func(b Bounds) bool { return s.aboveBounds(&b, now, false) }
	require.False(t, above(Bounds{Floor: 100, Free: 150}))
	s.CountLacking(60, 0)
	require.True(t, above(Bounds{Floor: 100, Free: 150}))
	require.False(t, above(Bounds{Floor: 100, Free: 160}))
	require.False(t, above(Bounds{Budget: 520}), "one more may go in")
	now.Disk = 0
	require.False(t, above(Bounds{Floor: 100, Free: 150}), "there is nothing that could go")
}

// The files that a compile has written are on the disk already: they fit above the floor where
// nothing else would, and need no eviction there. For the budget they are new.
func TestWrittenBytesNeedNoFreeSpace(t *testing.T) {
	s := newLedger()
	admits := func(b Bounds, r *Reservation) error {
		_, err := s.admit(&usageNow{Bounds: b}, r, 60, 0)
		return err
	}
	near := Bounds{Floor: 100, Free: 110}
	require.ErrorContains(t, admits(near, &Reservation{}),
		"110 B are free, of which 0 B are reserved for builds being stored and 100 B must "+
			"stay free")
	require.ErrorContains(t, admits(near, &Reservation{Written: 40}), "must stay free",
		"20 are to come")
	require.NoError(t, admits(near, &Reservation{Written: 50}))
	require.NoError(t, admits(near, &Reservation{Written: 1000}))
	require.ErrorContains(t, admits(Bounds{Floor: 100, Free: 99}, &Reservation{Written: 60}),
		"must stay free", "the floor itself is kept to")
	require.ErrorContains(t, admits(Bounds{Budget: 50}, &Reservation{Written: 60}),
		"the whole budget is 50 B")

	s.reserved.Disk, s.reserved.Written = 500, 495 // others'
	require.NoError(t, admits(near, &Reservation{Written: 55}))
	require.ErrorContains(t, admits(near, &Reservation{Written: 54}), "5 B are reserved",
		"what is written of the others' is in no use to ask for")
	guess := &Reservation{disk: 60} // was set aside before the compile, as what has to be written
	s.reserved.Disk, s.reserved.Written = 60, 0
	require.NoError(t, admits(Bounds{Floor: 100, Free: 160}, guess))
	guess.Written = 60
	require.NoError(t, admits(Bounds{Floor: 100, Free: 100}, guess))

	waits, now := newLedger(), &Account{Disk: 500}
	waits.CountLacking(60, 55)
	above := func(b Bounds) bool { return waits.aboveBounds(&b, now, false) }
	require.False(t, above(Bounds{Floor: 100, Free: 105}))
	require.True(t, above(Bounds{Floor: 100, Free: 104}))
}

// While a build is published it counts once to its user's quota: not as stored and as being stored.
func TestABuildThatIsPublishedCountsOnceToItsUsersQuota(t *testing.T) {
	st, err := Open(t.TempDir(), Options{Log: slog.New(slog.DiscardHandler), Now: time.Now,
		Settings: Settings{Space: SpaceOptions{UserBytes: Amount{Bytes: 1 << 20}}}})
	require.NoError(t, err)
	defer st.Close()
	r, err := st.Reserve(context.Background(), 7, false, 4096)
	require.NoError(t, err)
	require.Equal(t, map[uint32]int64{7: 4096}, st.ledger.reserved.ByUser)
	r.releaseQuota()
	require.Empty(t, st.ledger.reserved.ByUser)
	require.Positive(t, st.ledger.reserved.Disk, "its bytes are not on the disk yet")
	r.Release()
	require.Zero(t, st.ledger.reserved.Disk)
	require.Empty(t, st.ledger.reserved.ByUser)
}
