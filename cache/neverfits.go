package cache

import (
	"strings"
	"sync"

	"github.com/epcached/epcached/index"
)

// neverFitting are results for which there would be no room if all else went: the latest of each kind. Whoever asks for the same while such a
// result's view is there is given it too, for nobody could have it otherwise without compiling it again, which would end with one more view.
type neverFitting struct {
	mu  sync.Mutex
	all map[flightKey]neverFits // guarded by mu
}

type neverFits struct {
	result *compiled
	under  *settings // whose bounds say so
}

// add notes one, and forgets those whose views have gone.
func (n *neverFitting) add(key flightKey, result *compiled, under *settings) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for other, one := range n.all {
		if !one.result.alone.There() {
			delete(n.all, other)
		}
	}
	if n.all == nil {
		n.all = make(map[flightKey]neverFits)
	}
	n.all[key] = neverFits{&compiled{build: result.build, alone: result.alone, why: result.why, found: true}, under}
}

// find gives what was answered already; nil: there is nothing of that kind, or it may fit under the settings of now.
func (n *neverFitting) find(key flightKey, now *settings) *compiled {
	n.mu.Lock()
	defer n.mu.Unlock()
	if one := n.all[key]; one.under == now {
		return one.result
	}
	return nil
}

// reported gives the build of one of which somebody reports something, and forgets it if bad says that it may be no good; nil: there is none that may be
// meant. graph is as the answer gave it, or "".
func (n *neverFitting) reported(key index.BuildKey, graph string, may func(scope string) bool, bad func(*index.Build) bool) *index.Build {
	n.mu.Lock()
	defer n.mu.Unlock()
	for at, one := range n.all {
		if at.build == key && may(at.scope) && (graph == "" || strings.HasPrefix(graph, one.result.alone.ID()+"/")) {
			if bad(one.result.build) {
				delete(n.all, at)
			}
			return one.result.build
		}
	}
	return nil
}
