package store

import (
	"context"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/index"
)

// committer publishes and removes builds, and changes their states and pins, in one goroutine, so
// that no other change intervenes between the last check of a build and its change. Changes that
// arrive at the same time form a batch, which shares syncs and a transaction. Callers write and
// hash files before, and remove blobs afterwards. Hits do not use it.
type committer struct {
	index    *index.Index
	queue    chan *commitRequest
	stop     chan struct{}
	expected atomic.Int32 // publications that will be submitted within moments
}

// commitRequest has the changes that one caller submits.
type commitRequest struct {
	marks   []*index.Mark
	mayMark func() error // called right before the marks; its error prevents them; may be nil
	builds  []*change
	done    chan struct{} // closed when all changes are durable or have failed
}

// change is a build that is published or retracted.
type change struct {
	*index.Change
	may func() bool // called right before the change; false skips it; may be nil
	// then is called when the change is durable: it moves bytes in the ledger, and appends the
	// event.
	then func()
	done bool // it is durable
}

// batchWait bounds how long a batch waits for expected publications.
const batchWait = 5 * time.Millisecond

// commit submits changes, and waits until they are durable or have failed; each change has its own
// error. If the context ends first, commit returns its error, and the changes are carried out
// nevertheless.
func (c *committer) commit(ctx context.Context, h *commitRequest) error {
	h.done = make(chan struct{})
	select {
	case c.queue <- h:
	case <-c.stop:
		return os.ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-h.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run commits submitted changes until the store is closed.
func (c *committer) run() {
	for {
		select {
		case first := <-c.queue:
			c.commitBatch(c.batch(first))
		case <-c.stop:
			return
		}
	}
}

// batch adds the other submitted changes, and waits for expected publications. A single change does
// not wait.
func (c *committer) batch(first *commitRequest) []*commitRequest {
	batch := []*commitRequest{first}
	for end := time.Now().Add(batchWait); time.Now().Before(end); {
		select {
		case more := <-c.queue:
			batch = append(batch, more)
			continue
		default:
		}
		if c.expected.Load() == 0 {
			return batch
		}
		select {
		case more := <-c.queue:
			batch = append(batch, more)
		case <-time.After(time.Until(end)):
			return batch
		}
	}
	return batch
}

// commitBatch commits a batch. Marks come first, so that evictions in the batch see its pins.
func (c *committer) commitBatch(batch []*commitRequest) {
	var marks []*index.Mark
	var builds []*change
	for _, h := range batch {
		builds = append(builds, h.builds...)
		if h.mayMark != nil {
			c.index.Journal.Mark(marks) // because mayMark has to see them
			marks = nil
			if err := h.mayMark(); err != nil {
				for _, m := range h.marks {
					m.Err = err
				}
				continue
			}
		}
		marks = append(marks, h.marks...)
	}
	c.index.Journal.Mark(marks)
	builds = slices.DeleteFunc(builds, func(one *change) bool {
		return one.may != nil && !one.may()
	})
	changes := make([]*index.Change, len(builds))
	for i, one := range builds {
		changes[i] = one.Change
	}
	c.index.Commit(changes)
	for _, one := range builds {
		if one.done = one.Err == nil; one.done && one.then != nil {
			one.then()
		}
	}
	c.index.NoteRetracted(changes)
	for _, h := range batch {
		close(h.done)
	}
}

// mark records states and pins of builds, durably when it returns, unless may, which may be nil,
// fails.
func (c *committer) mark(ctx context.Context, may func() error, marks ...*index.Mark) error {
	err := c.commit(ctx, &commitRequest{marks: marks, mayMark: may})
	for i := 0; err == nil && i < len(marks); i++ { // else the committer may still write to them
		err = marks[i].Err
	}
	return err
}
