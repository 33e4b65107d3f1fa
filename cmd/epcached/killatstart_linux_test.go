package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// A daemon starts again whatever an earlier one left that was killed: as it began any of the system
// calls of its start that change the disk, or while it served.
func TestKilledAtEachStepOfItsStart(t *testing.T) {
	t.Parallel()
	detached := []string{"--autostart", "--detached"}
	sites := map[string]func(testing.TB, ...string) *site{"this user": newSite}
	if os.Geteuid() == 0 {
		sites["another user"] = ofAnotherUser
	}
	random := seeded(t)
	for user, make := range sites {
		for name, layout := range map[string]struct {
			socket, next string   // below the site's directory: of the killed daemon, and after it
			how          []string // of the killed daemon
		}{
			"socket in the state directory":         {"state/s", "state/s", nil},
			"socket elsewhere":                      {"run/s", "run/s", nil},
			"autostart":                             {"state/s", "state/s", detached},
			"autostart, linked":                     {"run/s", "run/s", detached},
			"autostart, runtime directory appears":  {"state/s", "run/s", detached},
			"autostart, runtime directory vanishes": {"run/s", "state/s", detached},
		} {
			own := rand.New(rand.NewPCG(random.Uint64(), 0))
			t.Run(user+", "+name, func(t *testing.T) {
				t.Parallel()
				prepared := func(t *testing.T) *site {
					s := make(t)
					dir := filepath.Dir(s.state)
					s.config, s.socket = "", filepath.Join(dir, layout.socket)
					return s
				}
				for _, at := range stepsOfStart(t, prepared(t), own, layout.how) {
					t.Run(fmt.Sprint(at), func(t *testing.T) {
						s := prepared(t)
						killedAtStart(t, s, at, layout.how)
						s.socket = filepath.Join(filepath.Dir(s.state), layout.next)
						requireStarts(t, s, layout.how)
					})
				}
			})
		}
	}
}

// stepsOfStart counts the decisive calls until the daemon answers, and chooses some, with one that
// comes later.
func stepsOfStart(t *testing.T, s *site, random *rand.Rand, how []string) (chosen []int64) {
	var calls atomic.Int64
	d, _ := s.launchStopped(t, func(n int, _ string) bool {
		calls.Store(int64(n))
		return false
	}, how...)
	d.dial().Close()
	all := calls.Load()
	require.Greater(t, all, int64(20))
	d.stop()
	wanted := number(t, "EPCACHED_KILL_MOMENTS", 3)
	for at := range all {
		if wanted == 0 || random.Int64N(all) < wanted {
			chosen = append(chosen, at+1)
		}
	}
	return append(chosen, all+1)
}

// killedAtStart kills a daemon as it begins that decisive call, or else when it answers.
func killedAtStart(t *testing.T, s *site, at int64, how []string) {
	d, _ := s.launchStopped(t, func(n int, _ string) bool { return int64(n) >= at }, how...)
	if c, err := d.tryDial(); err == nil {
		c.Close()
	}
	if d.running() {
		_ = d.cmd.Process.Kill() // it made fewer calls this time
	}
	d.wait()
}

func requireStarts(t *testing.T, s *site, how []string) {
	d, _ := s.launchStopped(t, func(int, string) bool { return false }, how...)
	d.dial().Close()
	d.stop()
}

// A container is a pid namespace of its own each time, with the same volume.
func TestKilledContainerStartsAgain(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can make a pid namespace")
	}
	s := newSite(t)
	s.socket = filepath.Join(s.state, "s")
	s.config = ""
	s.under = []string{"unshare", "--pid", "--fork", "--kill-child", "--mount-proc"}
	for range 3 {
		d := s.start(t)
		d.kill()
	}
}
