package unixsock

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// HelloLimit is the HelloTimeout for an application that goes on without a daemon: nobody notices it.
const HelloLimit = 50 * time.Millisecond

// Ask connects, calls ask, and closes the connection. Where that ends before there is an answer, because the daemon went
// away, it waits up to back for another one and asks it the same, once: it may be this very request that the daemon dies of.
// What the daemon said, and what is no protocol, is the answer. A view that ask got stays good.
func (d Dialer) Ask(ctx context.Context, back time.Duration, ask func(*Client) error, paths ...string) error {
	client, err := d.Dial(ctx, paths...)
	if err != nil {
		return err
	}
	if err = errors.Join(ask(client), client.Close()); !WentAway(err) {
		return err
	}
	d.Wait = back
	again, dialErr := d.Dial(ctx, paths...)
	if dialErr != nil {
		return fmt.Errorf("it did not come back: %w: %w", dialErr, err)
	}
	return errors.Join(ask(again), again.Close())
}

// WentAway tells a connection that ended, after which the same may be asked of another one, from one that was ended for a reason: what the daemon
// said, or what is no protocol, is the answer.
func WentAway(err error) bool {
	var said *Error
	return errors.Is(err, ErrConnectionLost) && !errors.As(err, &said)
}
