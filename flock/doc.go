// Package flock locks open files and folders among processes: one lock for all descriptors of one open file, wherever they were sent, which ends
// with the last of them. The lease on a view is a shared one; who has the state folder open, or takes a view away, has an exclusive one. It keeps
// nothing in memory, and any number of goroutines may use it.
package flock
