package index

import (
	"cmp"
	"slices"
	"sort"
)

// fairly gives those events that are kept where there is room for so many, of so many bytes: the latest of each user. Who
// causes many loses the oldest of its own, and pushes nobody else's out. The order stays, and events is not changed.
func fairly(events []Event, most, bytes int) []Event {
	place, count := make([]int, len(events)), make(map[string]int) // place: how many of the same user's are later
	for i := len(events) - 1; i >= 0; i-- {
		whose := events[i].whose()
		place[i] = count[whose]
		count[whose]++
	}
	room := func(each int) bool {
		n, size := 0, 0
		for i := range events {
			if place[i] < each {
				n, size = n+1, size+events[i].size()
			}
		}
		return n <= most && size <= bytes
	}
	each := sort.Search(len(events), func(each int) bool { return !room(each + 1) })
	if each == 0 {
		return slices.Clone(events[max(0, len(events)-most):]) // more users than room: the latest of all
	}
	kept := make([]Event, 0, min(len(events), most))
	for i := range events {
		if place[i] < each {
			kept = append(kept, events[i])
		}
	}
	return kept
}

// whose is the user whose doing it was; "": the machine's.
func (e *Event) whose() string { return cmp.Or(e.By, e.Scope) }

// size is roughly what the event takes in the file.
func (e *Event) size() int {
	return len(e.Text) + len(e.ModelName) + len(e.Runtime) + len(e.Scope) + len(e.By) + 160
}
