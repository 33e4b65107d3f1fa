// Package upkeep does what no request waits for. Rebuilds queue builds that are to be compiled
// again, and a Recompiler compiles them while the machine is not needed. Gains measure what a
// compile gained. A Backlog has queued jobs outlive the daemon.
//
// All methods may be called at the same time.
package upkeep
