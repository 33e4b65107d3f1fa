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

// keepHeapFloor lets a heap grow to the floor, and a larger one to twice its size. GOGC is respected.
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
	return int(min(most, max(200, 100*heapFloor/max(live, 1))-100))
}
