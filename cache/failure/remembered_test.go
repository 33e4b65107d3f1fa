package failure

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

func TestHowLongFailuresLast(t *testing.T) {
	o := Options{}.OrDefault()
	for name, c := range map[string]struct {
		f     Failure
		count int
		lasts time.Duration
	}{
		"a crash":              {Failure{Reason: Crash}, 1, time.Minute},
		"a crash after others": {Failure{Reason: Crash}, 4, 8 * time.Minute},
		"crashes without end":  {Failure{Reason: Crash}, 1 << 30, 24 * time.Hour},
		"memory":               {Failure{Reason: Memory}, 1, 10 * time.Minute},
		"time, again":          {Failure{Reason: Timeout}, 2, 20 * time.Minute},
		"a refusal":            {Failure{Reason: Refused}, 7, 24 * time.Hour},
		"no node":              {Failure{Reason: NoNode}, 1, 24 * time.Hour},
		"does not load":        {Failure{Reason: LoadCheck}, 1, 24 * time.Hour},
		"crashes when loaded": {Failure{Reason: LoadCheck,
			Facts: map[string]string{"signal": "SIGSEGV"}}, 1, time.Minute},
		"cancelled":             {Failure{Reason: Cancelled}, 1, 0},
		"nothing compiles here": {Failure{Reason: Sandbox}, 1, 0},
		"no worker":             {Failure{Reason: NoWorker}, 1, 0},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, c.lasts, o.holdTime(&c.f, c.count)) })
	}
}

func TestFailuresAreBounded(t *testing.T) {
	x, err := index.Open(t.TempDir(), index.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, x.Close()) }()
	fs := NewRemembered(time.Now, x, "", slog.New(slog.DiscardHandler))
	for i := range maxFailures + 10 {
		f := &Failure{Reason: Refused, UID: uint32(i / (failuresPerUser + 10))}
		key := Key{Scope: "shared"}
		key.Build[0], key.Build[1] = byte(i), byte(i>>8)
		fs.Remember(key, f, Options{}.OrDefault())
	}
	perUser := make(map[uint32]int)
	for _, f := range fs.List(Audience{All: true}, nil) {
		perUser[f.UID]++
	}
	total := 0
	for _, n := range perUser {
		require.LessOrEqual(t, n, failuresPerUser)
		total += n
	}
	require.LessOrEqual(t, total, maxFailures)
	require.Greater(t, total, maxFailures-100)
}
