package main

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// heapFloor is the size that the heap may have without a collection. By itself the runtime collects the
// small heap of a daemon every few hundred hits.
const heapFloor = 32 << 20

// keepHeapFloor has the collector leave a heap alone that is smaller than the floor, and one that lives
// from a larger heap grow to twice its size, as by default. The environment's GOGC is respected.
func keepHeapFloor() {
	if os.Getenv("GOGC") != "" {
		return
	}
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	type cycle struct{ *cycle }
	var after func(*cycle)
	after = func(*cycle) {
		metrics.Read(live)
		debug.SetGCPercent(gcPercent(live[0].Value.Uint64()))
		runtime.SetFinalizer(new(cycle), after) // runs after the next collection
	}
	after(nil)
}

// gcPercent is what lets a heap with so many live bytes grow to the floor, or to twice its size.
func gcPercent(live uint64) int {
	const most = 100 * heapFloor / (4 << 20) // the runtime's least heap is 4 MiB at 100
	if live >= heapFloor/2 {
		return 100
	}
	return int(min(most, 100*(heapFloor-live)/max(live, 1)))
}
