package watch

import (
	"slices"
	"time"
)

// subject is the state of one. It belongs to the loop; others use it as a name only.
//
// A subject is at rest until a sign: an event of the system's, or a look that
// differs from the one before. Then it is changing. While signs come it is
// looked at now and then, so that folders which appear are watched at once, and
// once after the last. A quiet period after the last sign it is looked at again.
// If that look is equal to the one before, nothing happened that no event told,
// and the subject has settled; if not, that is another sign.
type subject struct {
	name    string
	paths   []string
	placed  []chan struct{} // closed when paths are watched
	renewed bool            // paths are not those that were last looked at

	looking bool // a look is under way
	gone    bool // forgotten while a look was under way
	last    *look
	ended   time.Time // when the last look did
	took    time.Duration
	covered uint64 // signs when the last look began
	polled  string // why it is polled; "" if it is not

	signs    uint64
	changing bool
	since    time.Time // the first sign
	sign     time.Time // the last sign
	changed  []string  // at most maxPaths
}

func (s *subject) how() string {
	if s.polled != "" {
		return "polled: " + s.polled
	}
	return notified
}

func (s *subject) remember(paths []string) {
	for _, p := range paths {
		if len(s.changed) < maxPaths && !slices.Contains(s.changed, p) {
			s.changed = append(s.changed, p)
		}
	}
}

func (s *subject) event(k Kind) Event {
	return Event{Subject: s.name, Kind: k, Paths: slices.Clone(s.changed), Since: s.since, LastWrite: s.sign}
}
