// Package request has what a request is while it is answered: what an application asks for, one
// attempt at it, the plan for a runtime, and the answer. It reads no files of the store and starts
// nothing.
package request
