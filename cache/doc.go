// Package cache answers requests for compiled models: it wires the parts together, and Acquire is
// the whole flow of a request (acquire.go). It knows no bytes or frames.
//
// Acquire promises: an answer was compiled from exactly the bytes, and for exactly the request,
// that the client presented, and its digests hold. An answered build survives a power cut. A build
// is compiled once, however many clients request it at the same time. A view keeps its files as
// long as a client has the descriptor that came with it.
//
// Errors that a user is to read are *apierr.Error; a *identity.NeedFilesError lists files that a
// request lacks. A Cache may be used by any number of goroutines.
package cache
