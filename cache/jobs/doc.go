// Package jobs runs each piece of work once, however many callers want it: a compile, a claim, the taking-in of an
// artefact, an inquiry about a runtime.
//
// A piece of work is a Work. Jobs finds the Job that does it or starts one; callers wait for it, or have it finished
// without waiting. A job ends when nobody wants it any more. Work that runs in a process of the daemon's asks Begin
// first: a Queue gives places by rank, and within a rank in the order in which jobs came, within bounds on how many
// run and on the memory that they take together. Costs remember how long jobs of one kind took, and how much memory,
// so that a job can say what it will need.
//
// All of it may be used by any number of goroutines. Nothing here is durable but what Memos keep, and that may be
// lost. Start reading at Jobs.Join.
package jobs
