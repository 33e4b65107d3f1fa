// Package queue decides which jobs run and when, and guesses from earlier ones what they take.
//
// A Queue gives places by rank, and within a rank in the order in which jobs came, within bounds on how many run and on the memory that they
// take together. Costs remember how long jobs of one kind took, and how much memory, so that who enters can say what it will need. What a job
// does is no concern of either, nor who waits for it.
//
// Both may be used by any number of goroutines. Nothing here is durable but what Memos keep, and that may be lost.
package queue
