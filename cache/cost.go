package cache

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"math/bits"
	"strings"
	"time"

	"github.com/epcached/epcached/index"
)

// costs remember what compiles took, to say how long the next one will take and how much memory it needs. There is one
// record for each list of execution providers and each power of two of the model's size, beside the index; it may be
// lost. A new time counts for three tenths against those before, so that a machine's habits are followed and a single
// bad day is not. Of memory the most counts, and is forgotten by a tenth with each job that needs less.
//
// Where nothing is known of a size, the nearest one up to four powers of two away stands for it, in proportion.
type costs struct {
	index *index.Index
	log   *slog.Logger
}

// cost is what jobs of one kind took.
type cost struct {
	Seconds float64 // from when a job runs to when it has ended
	Memory  int64   // bytes, of the worker at its most
	Count   int     // of jobs that these are from
}

const (
	newTimeCounts  = 0.3
	memoryFades    = 0.1
	furthestClass  = 4
	memoryAtLeast  = 256 << 20 // of a worker of which nothing is known: the libraries alone take that much
	memoryPerModel = 4         // copies of the model that it holds then

	// What is beyond these is no measurement; sums of them do not overflow.
	longestJob = 365 * 24 * time.Hour
	largestJob = int64(1) << 50
)

// sizeClass is the power of two of a size.
func sizeClass(size int64) int { return bits.Len64(uint64(max(size, 1))) }

func costKey(a *jobFacts, class int) []byte {
	return fmt.Appendf(nil, "cost:%s:%d", strings.Join(a.eps, ","), class)
}

func (cs *costs) load(a *jobFacts, class int) (cost, bool) {
	var one cost
	raw, ok := cs.index.Memo(costKey(a, class))
	ok = ok && json.Unmarshal(raw, &one) == nil && one.Count > 0 && one.Seconds >= 0 && one.Seconds < longestJob.Seconds() &&
		one.Memory >= 0 && one.Memory < largestJob
	return one, ok
}

// near gives the cost of the nearest size of which something is known, in proportion.
func (cs *costs) near(a *jobFacts) (cost, bool) {
	class := sizeClass(a.size)
	for away := range furthestClass + 1 {
		if one, ok := cs.load(a, class-away); ok { // smaller ones
			one.Seconds *= float64(int64(1) << away)
			one.Memory <<= away
			return one, true
		}
		if one, ok := cs.load(a, class+away); ok { // larger ones: with less memory than they need it may not do
			one.Seconds /= float64(int64(1) << away)
			return one, true
		}
	}
	return cost{}, false
}

// estimate says how much memory a job will need, and how long it will take; 0: that is not known.
func (cs *costs) estimate(a *jobFacts) (memory int64, length time.Duration) {
	memory = memoryAtLeast + memoryPerModel*min(a.size, largestJob) // a sparse file may have any size
	one, ok := cs.near(a)
	if !ok {
		return memory, 0
	}
	if one.Memory > 0 {
		memory = one.Memory
	}
	return memory, time.Duration(one.Seconds * float64(time.Second))
}

// learn takes in what a job took. memory is 0 where nobody measured it. What ran at the lowest priority says how busy the
// machine was, so that its time counts only where there is no other.
func (cs *costs) learn(a *jobFacts, took time.Duration, memory int64, idle bool) {
	class := sizeClass(a.size)
	one, known := cs.load(a, class)
	switch {
	case !known:
		one.Seconds = took.Seconds()
	case !idle:
		one.Seconds += newTimeCounts * (took.Seconds() - one.Seconds)
	}
	one.Memory = max(memory, one.Memory-int64(memoryFades*float64(one.Memory)))
	one.Count++
	raw, err := json.Marshal(one)
	if err == nil {
		err = cs.index.SaveMemo(costKey(a, class), raw)
	}
	if err != nil {
		cs.log.Warn("cost of a compile not kept", "error", err) // the next one tells as much
	}
}
