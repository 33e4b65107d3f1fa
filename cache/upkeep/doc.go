// Package upkeep does what no request waits for. Rebuilds queue builds that are to be compiled again,
// and compile them while the machine is not needed. Gains measure what a compile gained. A Backlog has
// queued jobs outlive the daemon.
//
// All methods may be called at the same time. The package knows no store and runs no compiler: what a
// type needs of the cache comes in its options.
package upkeep
