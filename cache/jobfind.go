package cache

import (
	"maps"
	"slices"
	"strings"

	"github.com/epcached/epcached/refusal"
)

// findJob gives the job that an id names, or the beginning of one, if the peer may follow it: the flight of one that is under
// way, else what is known of one that has ended, or that the daemon wants by itself and has not begun.
func (c *Cache) findJob(p Peer, name string) (*flight, *Job, error) {
	id, err := c.jobID(p, name)
	if err != nil {
		return nil, nil, err
	}
	anew := c.jobAnew(p, id) // looked for first: what it becomes then is found
	fs := &c.flights
	fs.mu.Lock()
	fs.forget()
	f := fs.all[id]
	var past *pastJob
	for i := range fs.past { // one that failed may have been begun again
		if fs.past[i].job.ID == id {
			one := fs.past[i]
			past = &one
		}
	}
	fs.mu.Unlock()
	switch {
	case f != nil:
		if c.mayFollow(p, &f.about, f.askedBy(p.UID)) {
			return f, nil, nil
		}
	case past != nil:
		if c.mayFollowPast(p, past) {
			return nil, &past.job, nil
		}
	case anew != nil:
		return nil, anew, nil
	}
	return nil, nil, refusal.New(refusal.NotFound, nil, "no job %.80q: none is under way, or ended within %s, whose id begins so", name, pastJobsFor).
		WithHint("epcachectl jobs shows those that wait or run")
}

// jobID completes the beginning of a job's id, among those that the peer may follow. What begins none stays as it is.
func (c *Cache) jobID(p Peer, name string) (string, error) {
	found := make(map[string]bool)
	for _, f := range c.flights.list() {
		if strings.HasPrefix(f.id, name) && c.mayFollow(p, &f.about, f.askedBy(p.UID)) {
			found[f.id] = true
		}
	}
	for _, j := range c.jobsAnew(p) {
		if strings.HasPrefix(j.ID, name) {
			found[j.ID] = true
		}
	}
	c.flights.mu.Lock()
	past := slices.Clone(c.flights.past)
	c.flights.mu.Unlock()
	for i := range past {
		if strings.HasPrefix(past[i].job.ID, name) && c.mayFollowPast(p, &past[i]) {
			found[past[i].job.ID] = true
		}
	}
	switch {
	case name == "" || found[name] || len(found) == 0:
		return name, nil
	case len(found) > 1:
		return "", refusal.New(refusal.BadRequest, nil, "job %.80q: %d jobs begin so", name, len(found)).WithHint("write more of its id: epcachectl jobs --json")
	}
	for id := range maps.Keys(found) {
		name = id
	}
	return name, nil
}

func (c *Cache) mayFollowPast(p Peer, past *pastJob) bool {
	_, asked := past.job.askers[p.UID]
	return c.mayFollow(p, &past.about, asked)
}
