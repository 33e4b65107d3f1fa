// Package systemd reports to systemd the state of the daemon.
package systemd

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// Notify sends a state, as sd_notify(3) does.
func Notify(log *slog.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("systemd not notified", "state", state, "error", err)
	}
}

// openingLimit is how long systemd should wait for the next report of a daemon that is opening a
// large store. Without reports it kills a daemon that is not ready after 90 s, and every restart
// would fail in the same way.
const openingLimit = 2 * time.Minute

// StillOpening has systemd wait longer, and reports the current step.
func StillOpening(what string) string {
	return fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d\nSTATUS=%s", openingLimit.Microseconds(), what)
}

// Watchdog reports to systemd regularly that the daemon is alive, if the unit has a watchdog.
func Watchdog(ctx context.Context, log *slog.Logger) (stop func()) {
	every, err := daemon.SdWatchdogEnabled(false)
	if err != nil || every == 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		tick := time.NewTicker(every / 2)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				Notify(log, daemon.SdNotifyWatchdog)
			}
		}
	}()
	return cancel
}
