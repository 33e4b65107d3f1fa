package cache

import (
	"maps"
	"slices"
	"strings"

	"github.com/epcached/epcached/refusal"
)

// findJob gives the job that an id names, or the beginning of one, if the peer may follow it: the flight, also of one that
// ended lately, or what the daemon wants by itself and has not begun.
func (c *Cache) findJob(p Peer, name string) (f *flight, anew *Job, err error) {
	id, err := c.jobID(p, name)
	if err != nil {
		return nil, nil, err
	}
	anew = c.jobAnew(p, id) // looked for first: what it becomes then is found
	for _, one := range c.flights.known() {
		if one.id == id { // one that failed may have been begun again
			f = one
		}
	}
	switch {
	case f != nil && c.mayFollow(p, &f.about, f.askedBy(p.UID)):
		return f, nil, nil
	case f == nil && anew != nil:
		return nil, anew, nil
	}
	return nil, nil, refusal.New(refusal.NotFound, nil, "no job %.80q: none is under way, or ended within %s, whose id begins so", name, pastJobsFor).
		WithHint("epcachectl jobs shows those that wait or run")
}

// jobID completes the beginning of a job's id, among those that the peer may follow. What begins none stays as it is.
func (c *Cache) jobID(p Peer, name string) (string, error) {
	found := make(map[string]bool)
	for _, f := range c.flights.known() {
		if strings.HasPrefix(f.id, name) && c.mayFollow(p, &f.about, f.askedBy(p.UID)) {
			found[f.id] = true
		}
	}
	for _, j := range c.jobsAnew(p) {
		if strings.HasPrefix(j.ID, name) {
			found[j.ID] = true
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

// known gives the flights that ended lately, the oldest first, and then those that have not ended.
func (fs *flights) known() []*flight {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.forget()
	return slices.AppendSeq(slices.Clone(fs.past), maps.Values(fs.all))
}
