package unixsock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

// broadcaster is a backend's Subscribe that gives whatever is published from then on.
type broadcaster struct {
	mu     sync.Mutex
	events []*wire.Event
	more   chan struct{} // closed at the next event
	ends   int           // subscriptions that run
	sent   atomic.Int64
}

func (b *broadcaster) subscribe(ctx context.Context, send func(*wire.Event) error) error {
	b.mu.Lock()
	next := len(b.events)
	b.ends++
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.ends--
	}()
	for {
		b.mu.Lock()
		events := b.events[next:]
		if b.more == nil {
			b.more = make(chan struct{})
		}
		more := b.more
		b.mu.Unlock()
		for _, e := range events {
			if ctx.Err() != nil {
				return nil
			}
			if err := send(e); err != nil {
				return err
			}
			b.sent.Add(1)
		}
		next += len(events)
		select {
		case <-ctx.Done():
			return nil
		case <-more:
		}
	}
}

func (b *broadcaster) subscribers() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ends
}

func (b *broadcaster) publish(text string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.events = append(b.events,
		&wire.Event{Sequence: uint64(len(b.events) + 1), Kind: "compiled", Text: text})
	if b.more != nil {
		close(b.more)
		b.more = nil
	}
}

func (b *broadcaster) await(t *testing.T, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return b.subscribers() == n }, patience, time.Millisecond)
}

func subscribeFrame(number uint64) []byte {
	return framed(&wire.Envelope{Request: number,
		Body: &wire.Envelope_Subscribe{Subscribe: &wire.Subscribe{}}})
}

func cancelFrame(number uint64) []byte {
	return framed(&wire.Envelope{Request: number,
		Body: &wire.Envelope_Cancel{Cancel: &wire.Cancel{}}})
}

func TestEventsComeInOrder(t *testing.T) {
	var b broadcaster
	s := serve(t, &standIn{subscribe: b.subscribe}, limits{})
	c := dial(t, s)
	ctx, cancel := context.WithCancel(background(t))
	var seen []uint64
	ended := make(chan error, 1)
	go func() {
		ended <- c.Subscribe(ctx, func(e *wire.Event) error {
			seen = append(seen, e.GetSequence())
			if len(seen) == 50 {
				cancel()
			}
			return nil
		})
	}()
	b.await(t, 1)
	for range 50 {
		b.publish("made")
	}
	require.NoError(t, <-ended, "an end that was asked for is no error")
	require.Len(t, seen, 50)
	for i, sequence := range seen {
		require.EqualValues(t, i+1, sequence)
	}
	b.await(t, 0)
}

func TestSubscribersFailureCancels(t *testing.T) {
	var b broadcaster
	s := serve(t, &standIn{subscribe: b.subscribe}, limits{})
	c := dial(t, s)
	enough := errors.New("enough")
	ended := make(chan error, 1)
	go func() {
		ended <- c.Subscribe(background(t), func(*wire.Event) error { return enough })
	}()
	b.await(t, 1)
	b.publish("made")
	require.ErrorIs(t, <-ended, enough)
	b.await(t, 0)
	_, err := Ask[wire.StatusReply](background(t), c, &wire.Status{}, nil)
	require.NoError(t, err, "the connection goes on")
}

func TestRequestsContinueBesideASubscription(t *testing.T) {
	var b broadcaster
	s := serve(t, &standIn{subscribe: b.subscribe}, limits{})
	c := dial(t, s)
	ctx, cancel := context.WithCancel(background(t))
	ended := make(chan error, 1)
	inside := make(chan struct{})
	go func() {
		ended <- c.Subscribe(ctx, func(*wire.Event) error {
			close(inside)
			<-ctx.Done() // and delays no other request
			return nil
		})
	}()
	b.await(t, 1)
	b.publish("made")
	<-inside
	for range 2 * maxPendingEvents {
		b.publish("more than the client keeps")
	}
	_, err := Ask[wire.StatusReply](background(t), c, &wire.Status{}, nil)
	require.NoError(t, err)
	cancel()
	require.NoError(t, <-ended)
}

// A callback that lags behind loses the oldest events, and is notified.
func TestSlowSubscribersReceiveMissed(t *testing.T) {
	var b broadcaster
	s := serve(t, &standIn{subscribe: b.subscribe}, limits{})
	c := dial(t, s)
	ctx, cancel := context.WithCancel(background(t))
	const published = 10 * maxPendingEvents
	release := make(chan struct{})
	var seen []uint64
	missed := 0
	ended := make(chan error, 1)
	go func() {
		ended <- c.Subscribe(ctx, func(e *wire.Event) error {
			<-release
			if e.GetKind() == EventMissed {
				missed++
				return nil
			}
			seen = append(seen, e.GetSequence())
			if e.GetSequence() == published {
				cancel()
			}
			return nil
		})
	}()
	b.await(t, 1)
	for range published {
		b.publish("made")
	}
	require.Eventually(t, func() bool { return b.sent.Load() == published }, patience,
		time.Millisecond)
	close(release)
	require.NoError(t, <-ended)
	require.Less(t, len(seen), published)
	require.EqualValues(t, published, seen[len(seen)-1], "the newest are kept")
	require.IsIncreasing(t, seen)
	require.NotZero(t, missed)
}

// The connection's reader delivers events to all subscribers, and never waits for one of them.
func TestDeliveryDoesNotWait(t *testing.T) {
	waiting := newCall(false)
	waiting.events = make(chan *wire.Event, 3)
	c := &Client{calls: map[uint64]*call{1: waiting}}
	delivered := make(chan struct{})
	go func() {
		defer close(delivered)
		for i := range 10 {
			c.deliver(1, envelopeOf(1, &wire.Event{Sequence: uint64(i)}), nil)
		}
	}()
	select {
	case <-delivered:
	case <-time.After(patience):
		t.Fatal("an event waits for its subscriber")
	}
	for _, newest := range []uint64{7, 8, 9} {
		require.Equal(t, newest, (<-waiting.events).GetSequence())
	}
	c.deliver(2, envelopeOf(2, &wire.Event{}), nil) // for no subscriber
}

func TestCancelledSubscription(t *testing.T) {
	var b broadcaster
	s := serve(t, &standIn{subscribe: b.subscribe}, limits{})
	c := rawHello(t, s)
	c.write(subscribeFrame(7))
	b.await(t, 1)
	b.publish("made")
	e, _ := c.read()
	require.EqualValues(t, 7, e.GetRequest())
	require.Equal(t, "made", e.GetEvent().GetText())
	c.write(cancelFrame(7))
	e, _ = c.read()
	require.EqualValues(t, 7, e.GetRequest())
	require.Equal(t, wire.ErrorClass_CANCELLED, e.GetError().GetClass())
	b.await(t, 0)

	c.write(subscribeFrame(7)) // the number is free again
	b.await(t, 1)
	b.publish("again")
	e, _ = c.read()
	require.Equal(t, "again", e.GetEvent().GetText())
}

func TestDeadlineEndsASubscription(t *testing.T) {
	s := serve(t, &standIn{}, limits{})
	c := rawHello(t, s)
	c.write(framed(&wire.Envelope{Request: 1, DeadlineMs: 20,
		Body: &wire.Envelope_Subscribe{Subscribe: &wire.Subscribe{}}}))
	e, _ := c.read()
	require.Equal(t, wire.ErrorClass_DEADLINE, e.GetError().GetClass())
}

func TestSubscriberThatLeaves(t *testing.T) {
	var b broadcaster
	s := serve(t, &standIn{subscribe: b.subscribe}, limits{})
	c := rawHello(t, s)
	c.write(subscribeFrame(1))
	b.await(t, 1)
	require.NoError(t, c.conn.Close())
	b.await(t, 0)
	b.publish("nobody hears it")
}

// A subscriber that never reads loses its own connection, and delays no other.
func TestStalledSubscriber(t *testing.T) {
	var b broadcaster
	s := serve(t, &standIn{subscribe: b.subscribe}, limits{WriteTimeout: 300 * time.Millisecond})
	stalled := rawHello(t, s)
	stalled.write(subscribeFrame(1))
	b.await(t, 1)
	const published = 20_000
	for range published { // 20 MB
		b.publish(strings.Repeat("x", 1<<10))
	}
	_, err := Ask[wire.StatusReply](background(t), dial(t, s), &wire.Status{}, nil)
	require.NoError(t, err, "others are served meanwhile")
	b.await(t, 0) // the write's time limit ends it
	require.Less(t, b.sent.Load(), int64(published), "what is not read waits with the backend")
	stalled.readEnd()
}

// A subscriber that reads late, but in time, gets every event.
func TestSubscriberThatReadsLate(t *testing.T) {
	var b broadcaster
	s := serve(t, &standIn{subscribe: b.subscribe}, limits{})
	c := rawHello(t, s)
	c.write(subscribeFrame(1))
	b.await(t, 1)
	const published = 2000
	for range published { // 2 MB: more than fits into the socket
		b.publish(strings.Repeat("x", 1<<10))
	}
	for i := range published {
		e, _ := c.read()
		require.EqualValues(t, i+1, e.GetEvent().GetSequence())
	}
}

func TestEventsAreCut(t *testing.T) {
	var b broadcaster
	s := serve(t, &standIn{subscribe: b.subscribe}, limits{})
	c := rawHello(t, s)
	c.write(subscribeFrame(1))
	b.await(t, 1)
	b.publish(strings.Repeat("x", 2<<20))
	e, _ := c.read()
	require.Len(t, e.GetEvent().GetText(), maxEventText)
	b.publish("not \xff text")
	e, _ = c.read()
	require.Equal(t, "not \uFFFD text", e.GetEvent().GetText())
}

func TestSubscriptionsOfOneConnection(t *testing.T) {
	var b broadcaster
	s := serve(t, &standIn{subscribe: b.subscribe}, limits{Subscriptions: 2})
	c := rawHello(t, s)
	c.write(subscribeFrame(1))
	c.write(subscribeFrame(2))
	b.await(t, 2)
	c.write(subscribeFrame(3))
	e, _ := c.read()
	require.EqualValues(t, 3, e.GetRequest())
	require.Equal(t, wire.ErrorClass_BUSY, e.GetError().GetClass())
	c.write(cancelFrame(1))
	e, _ = c.read()
	require.EqualValues(t, 1, e.GetRequest())
	c.write(subscribeFrame(4))
	b.await(t, 2)
}

func TestSubscriptionsOfOneUser(t *testing.T) {
	var b broadcaster
	s := serve(t, &standIn{subscribe: b.subscribe}, limits{SubscriptionsPerUID: 2})
	for i := range 2 {
		rawHello(t, s).write(subscribeFrame(1))
		b.await(t, i+1)
	}
	err := dial(t, s).Subscribe(background(t), func(*wire.Event) error { return nil })
	require.ErrorIs(t, err, ErrBusy)
}

func TestShutdownEndsSubscriptions(t *testing.T) {
	var b broadcaster
	s := serve(t, &standIn{subscribe: b.subscribe}, limits{})
	c := dial(t, s)
	ended := make(chan error, 1)
	go func() { ended <- c.Subscribe(background(t), func(*wire.Event) error { return nil }) }()
	b.await(t, 1)
	require.NoError(t, s.Shutdown(background(t)), "it does not wait for subscribers")
	require.ErrorIs(t, <-ended, ErrBusy)
}

func TestEndOfTheConnectionEndsASubscription(t *testing.T) {
	var b broadcaster
	s := serve(t, &standIn{subscribe: b.subscribe}, limits{})
	c := dial(t, s)
	var seen atomic.Int64
	ended := make(chan error, 1)
	go func() {
		ended <- c.Subscribe(background(t), func(*wire.Event) error { seen.Add(1); return nil })
	}()
	b.await(t, 1)
	b.publish("made")
	require.Eventually(t, func() bool { return seen.Load() == 1 }, patience, time.Millisecond)
	s.stop()
	err := <-ended
	require.Truef(t, errors.Is(err, ErrConnectionLost) || errors.Is(err, ErrBusy), "%v", err)
	require.ErrorIs(t, c.Subscribe(background(t), func(*wire.Event) error { return nil }),
		ErrConnectionLost)
}

func TestBackendThatCannotSubscribe(t *testing.T) {
	failed := fmt.Errorf("events: %w", &Error{Class: wire.ErrorClass_UNAVAILABLE, Text: "none"})
	s := serve(t,
		&standIn{subscribe: func(context.Context, func(*wire.Event) error) error { return failed }},
		limits{})
	err := dial(t, s).Subscribe(background(t), func(*wire.Event) error { return nil })
	require.ErrorIs(t, err, ErrUnavailable)

	s = serve(t,
		&standIn{subscribe: func(context.Context, func(*wire.Event) error) error { return nil }},
		limits{})
	err = dial(t, s).Subscribe(background(t), func(*wire.Event) error { return nil })
	require.ErrorIs(t, err, ErrCancelled, "an end without a cancel is reported")
}

// An event that the backend sends after its Subscribe has returned must not reach a later request
// of the same number.
func TestEventsAfterTheEnd(t *testing.T) {
	kept := make(chan func(*wire.Event) error, 1)
	s := serve(t,
		&standIn{subscribe: func(ctx context.Context, send func(*wire.Event) error) error {
			kept <- send
			<-ctx.Done()
			return nil
		}}, limits{})
	c := rawHello(t, s)
	c.write(subscribeFrame(1))
	send := <-kept
	c.write(cancelFrame(1))
	e, _ := c.read()
	require.NotNil(t, e.GetError())
	require.Error(t, send(&wire.Event{Text: "too late"}))
	c.write(statusFrame(1))
	e, _ = c.read()
	require.NotNil(t, e.GetStatusReply())
}

func TestSubscribeWithDescriptors(t *testing.T) {
	s := serve(t, &standIn{}, limits{})
	c := rawHello(t, s)
	frame := framed(&wire.Envelope{Request: 1, Descriptors: 1,
		Body: &wire.Envelope_Subscribe{Subscribe: &wire.Subscribe{}}})
	c.write(frame, int(modelFile(t).Fd()))
	require.Contains(t, c.readEnd().GetText(), "takes none")
}

func TestReportsTextIsCut(t *testing.T) {
	got := make(chan int, 1)
	s := serve(t,
		&standIn{report: func(_ context.Context, r *wire.Report) (*wire.ReportReply, error) {
			got <- len(r.GetText())
			return &wire.ReportReply{}, nil
		}}, limits{})
	report := &wire.Report{Text: strings.Repeat("x", 100<<10)}
	_, err := Ask[wire.ReportReply](background(t), dial(t, s), report, nil)
	require.NoError(t, err)
	require.Equal(t, MaxReportText, <-got)
}

func TestManySubscribersComeAndGo(t *testing.T) {
	var b broadcaster
	// A subscription that was cancelled counts until the daemon has seen it.
	s := serve(t, &standIn{subscribe: b.subscribe},
		limits{Subscriptions: 100, SubscriptionsPerUID: 100, Requests: 100})
	stop := make(chan struct{})
	var publisher, callers sync.WaitGroup
	publisher.Go(func() {
		tick := time.NewTicker(50 * time.Microsecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				b.publish("made")
			}
		}
	})
	c := dial(t, s)
	failed := make(chan error, 4)
	for range 4 {
		callers.Go(func() {
			for range 20 {
				seen := 0
				ctx, cancel := context.WithCancel(context.Background())
				err := c.Subscribe(ctx, func(*wire.Event) error {
					if seen++; seen == 3 {
						cancel()
					}
					return nil
				})
				cancel()
				if err != nil {
					failed <- err
					return
				}
			}
		})
	}
	callers.Wait()
	close(stop)
	publisher.Wait()
	close(failed)
	require.NoError(t, <-failed)
}
