package jobs

import (
	"fmt"
	"log/slog"
	"math/bits"
	"strings"
	"time"

	"github.com/epcached/epcached/internal/memo"
)

// Costs remember what compiles took, to say how long the next one will take and how much memory it needs. There is one
// record for each list of execution providers and each power of two of the model's size, beside the index; it may be
// lost. A new time counts for three tenths against those before, so that a machine's habits are followed and a single
// bad day is not. Of memory the most counts, and is forgotten by a tenth with each job that needs less.
//
// Where nothing is known of a size, the nearest one up to four powers of two away stands for it, in proportion.
type Costs struct {
	memos memo.Book
	log   *slog.Logger
}

// NewCosts gives what the memos know.
func NewCosts(memos memo.Book, log *slog.Logger) Costs { return Costs{memos, log} }

// Kind is what jobs are told apart by.
type Kind struct {
	EPs  []string // execution providers, in order
	Size int64    // bytes of the model
}

type cost struct {
	Seconds float64 // from when a job runs to when it has ended
	Memory  int64   // bytes, of the workers at their most
	Output  int64   // bytes of what was compiled, for each KiB of the model
	Count   int     // of jobs that these are from
}

// LeastMemory is what the workers of a job of which nothing is known take at the least, in bytes: the libraries alone do.
const LeastMemory = 256 << 20

const (
	newTimeCounts  = 0.3
	memoryFades    = 0.1
	furthestClass  = 4
	memoryPerModel = 4 // copies of the model that the workers of a job hold of which nothing is known

	// What is beyond these is no measurement; sums of them do not overflow.
	longestJob = 365 * 24 * time.Hour
	largestJob = int64(1) << 50
)

func sizeClass(size int64) int { return bits.Len64(uint64(max(size, 1))) }

func costKey(k Kind, class int) string {
	return fmt.Sprintf("cost:%s:%d", strings.Join(k.EPs, ","), class)
}

func (cs *Costs) load(k Kind, class int) (cost, bool) {
	one, ok := memo.Recall[cost](cs.memos, costKey(k, class))
	ok = ok && one.Count > 0 && one.Seconds >= 0 && one.Seconds < longestJob.Seconds() &&
		one.Memory >= 0 && one.Memory < largestJob && one.Output >= 0 && one.Output < largestJob
	return one, ok
}

// near gives the cost of the nearest size of which something is known, in proportion.
func (cs *Costs) near(k Kind) (cost, bool) {
	class := sizeClass(k.Size)
	for away := range furthestClass + 1 {
		if one, ok := cs.load(k, class-away); ok { // smaller ones
			one.Seconds *= float64(int64(1) << away)
			one.Memory <<= away
			return one, true
		}
		if one, ok := cs.load(k, class+away); ok { // larger ones: with less memory than they need it may not do
			one.Seconds /= float64(int64(1) << away)
			return one, true
		}
	}
	return cost{}, false
}

// Estimate says how much memory a job will need, and how long it will take; 0: that is not known.
func (cs *Costs) Estimate(k Kind) (memory int64, length time.Duration) {
	memory = LeastMemory + memoryPerModel*min(k.Size, largestJob) // a sparse file may have any size
	one, ok := cs.near(k)
	if !ok {
		return memory, 0
	}
	if one.Memory > 0 {
		memory = one.Memory
	}
	return memory, time.Duration(one.Seconds * float64(time.Second))
}

// Output says how many bytes will be compiled, about: as many as the model has where nothing is known.
func (cs *Costs) Output(k Kind) int64 {
	one, ok := cs.near(k)
	if !ok || one.Output == 0 {
		return k.Size
	}
	return min(one.Output, largestJob/max(k.Size>>10, 1)) * max(k.Size>>10, 1)
}

// Learn takes in what a job took. memory is 0 where nobody measured it. What ran at the lowest priority says how busy the
// machine was, so that its time counts only where there is no other.
func (cs *Costs) Learn(k Kind, took time.Duration, memory, output int64, idle bool) {
	class := sizeClass(k.Size)
	one, known := cs.load(k, class)
	switch {
	case !known:
		one.Seconds = took.Seconds()
	case !idle:
		one.Seconds += newTimeCounts * (took.Seconds() - one.Seconds)
	}
	one.Memory = max(memory, one.Memory-int64(memoryFades*float64(one.Memory)))
	if output > 0 {
		one.Output = max(1, output/max(k.Size>>10, 1))
	}
	one.Count++
	if err := memo.Save(cs.memos, costKey(k, class), one); err != nil {
		cs.log.Warn("cost of a compile not kept", "error", err) // the next one tells as much
	}
}
