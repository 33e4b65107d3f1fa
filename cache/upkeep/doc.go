// Package upkeep does what no request waits for: it queues builds that are to be compiled again, and
// compiles them one after the other while the machine is not needed.
//
// Start with Rebuilds. All methods may be called at the same time. The package knows no store and runs
// no compiler: what it needs of the cache comes in Options.
package upkeep
