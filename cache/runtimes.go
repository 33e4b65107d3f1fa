package cache

import (
	"context"
	"errors"

	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/runtimes"
)

// openRuntimes makes the set of runtimes, which is started when all that it calls is there.
func (c *Cache) openRuntimes() {
	o := &c.options
	c.runtimes = runtimes.New(runtimes.Options{
		Compiler: c.compiler, Runtimes: o.Runtimes, Drivers: o.Drivers, Quiet: o.Quiet, Poll: o.Poll, UID: c.uid,
		Book: &c.index.Memos, Now: c.now, Log: c.log,
		Event: c.happened, Inquire: c.flights.inquire, Assessed: func(ctx context.Context, rt *runtimes.Runtime, rc *runtimes.Content, former map[string]string, told bool) bool {
			return c.judges.All(ctx, rt, rc, former, told)
		}, Attach: func() any { return &notes{} },
		ReadShown: func(ctx context.Context, uid uint32) (func(), error) {
			return c.reading.Lock(ctx, c.owners.Of(uid))
		},
	})
}

// notes are what is remembered of one runtime for as long as its libraries are what they are.
type notes struct {
	plans    plans
	verdicts judge.Verdicts // of builds that others made
}

func notesOn(rc *runtimes.Content) *notes { return rc.Attached.(*notes) }

// inquiry finds out something of a runtime before a request can be thought through: which devices its execution providers
// list, or what they make of one node. The first time that may take long, so users see it among the jobs, and may give it up.
// One that nobody asked for is the daemon's own business, and not shown.
type inquiry struct {
	about jobFacts
	find  func(context.Context) (any, error)
}

func (q *inquiry) facts() jobFacts { return q.about }

func (q *inquiry) run(ctx context.Context, f *flight) (*compiled, error) {
	f.mu.Lock()
	f.state, f.started = JobRunning, f.flights.now()
	f.tellLocked("probing")
	f.mu.Unlock()
	fact, err := q.find(ctx)
	if err != nil {
		return nil, err
	}
	return &compiled{fact: fact}, nil
}

// inquire runs find for the key, once however many ask at that time. It goes on when those who asked have left: what it
// brings serves whoever asks next.
func (fs *flights) inquire(ctx context.Context, q runtimes.Question, find func(context.Context) (any, error)) (any, error) {
	who := asking{uid: q.Asker.UID, name: q.Asker.Model, idle: !q.Asker.Request, goOn: true, since: fs.now()}
	result, _, err := fs.join(ctx, flightKey{alone: q.Key}, who, func() (runner, error) {
		about := jobFacts{inquiry: true}
		about.Job = Job{ModelName: who.name, EP: q.EP, UID: who.uid, Why: "asked for: what its execution provider does here is found out first"}
		return &inquiry{about, find}, nil
	})
	if err != nil {
		return nil, err
	}
	return result.fact, nil
}

// inquirer is the request as it asks about a runtime.
func inquirer(r *Request) runtimes.Asker {
	return runtimes.Asker{Request: true, UID: r.Peer.UID, Model: r.Name}
}

// hidden tells whether the flight is one that no user asked for and none can do anything about. The caller holds f.mu.
func (f *flight) hidden() bool { return f.about.inquiry && len(f.askers) == 0 }

// givenUp is the error of a request that left, or whose inquiry was cancelled; nil if that is not what happened.
func givenUp(ctx context.Context, model string, err error) error {
	if err != nil && (ctx.Err() != nil || errors.Is(err, runtimes.ErrGivenUp)) {
		return flightError(ctx, model, err)
	}
	return nil
}
