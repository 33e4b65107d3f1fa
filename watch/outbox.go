package watch

// outbox holds what the user of a Watcher has not taken yet: a Changing and a
// Settled for each subject at most.
type outbox struct {
	order   []string // subjects with something waiting, each once
	waiting map[string]*pending
}

type pending struct{ changing, settled *Event }

// put adds an event. A subject's are put in turn: Changing, Settled, Changing.
func (o *outbox) put(e Event) {
	if o.waiting == nil {
		o.waiting = make(map[string]*pending)
	}
	p := o.waiting[e.Subject]
	if p == nil {
		p = &pending{}
		o.waiting[e.Subject] = p
		o.order = append(o.order, e.Subject)
	}
	if e.Kind == Settled {
		p.settled = &e
	} else {
		p.changing = &e
	}
}

// unsettle takes a Settled back that nobody has heard of.
func (o *outbox) unsettle(name string) (Event, bool) {
	p := o.waiting[name]
	if p == nil || p.settled == nil {
		return Event{}, false
	}
	e := *p.settled
	if p.settled = nil; p.changing == nil {
		o.drop(name)
	}
	return e, true
}

// head is what is delivered next.
func (o *outbox) head() (Event, bool) {
	if len(o.order) == 0 {
		return Event{}, false
	}
	p := o.waiting[o.order[0]]
	if p.changing != nil {
		return *p.changing, true
	}
	return *p.settled, true
}

// pop removes the head. A subject that has more to say waits for its turn.
func (o *outbox) pop() {
	name := o.order[0]
	o.order = o.order[1:]
	p := o.waiting[name]
	if p.changing != nil && p.settled != nil {
		p.changing = nil
		o.order = append(o.order, name)
		return
	}
	delete(o.waiting, name)
}

// drop forgets what is waiting for a subject.
func (o *outbox) drop(name string) {
	if o.waiting[name] == nil {
		return
	}
	delete(o.waiting, name)
	kept := o.order[:0]
	for _, n := range o.order {
		if n != name {
			kept = append(kept, n)
		}
	}
	o.order = kept
}
