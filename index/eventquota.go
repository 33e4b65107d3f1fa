package index

import (
	"cmp"
	"slices"
)

// latestOfEachUser returns the events to keep if there is space for most events of bytes bytes: the
// latest of each user. If one user causes many, it drops that user's oldest ones, and none of other
// users. It keeps the order, and does not change events.
func latestOfEachUser(events []Event, most, bytes int) []Event {
	type ranked struct{ at, later int } // later is how many events of the same user follow
	list, count := make([]ranked, 0, len(events)), make(map[string]int)
	for i := len(events) - 1; i >= 0; i-- {
		user := events[i].user()
		list = append(list, ranked{i, count[user]})
		count[user]++
	}
	slices.SortStableFunc(list, func(a, b ranked) int { return cmp.Compare(a.later, b.later) })
	n := 0
	for ; n < min(most, len(list)); n++ {
		if bytes -= events[list[n].at].size(); bytes < 0 {
			break
		}
	}
	list = list[:n]
	slices.SortFunc(list, func(a, b ranked) int { return cmp.Compare(a.at, b.at) })
	kept := make([]Event, n)
	for i, r := range list {
		kept[i] = events[r.at]
	}
	return kept
}

// user returns the user that caused the event; "": the machine.
func (e *Event) user() string { return cmp.Or(e.By, e.Scope) }

// size is roughly what the event takes in the file.
func (e *Event) size() int {
	return len(e.Text) + len(e.ModelName) + len(e.Runtime) + len(e.Scope) + len(e.By) + 160
}
