// Package cache is the heart of epcached: it answers requests for compiled models.
//
// It knows the policies and no bytes or frames: package cas keeps the bytes, forms the shapes that they lie in, index the records, jobs the order
// of jobs, epmodel reads models, compilers runs vendor code in child processes, and the daemon's socket adapts to the types here.
//
// The promises. What Acquire answers was compiled from exactly the bytes, and for exactly the request, that were
// presented, and its digests hold; what it answered survives a power cut; a build is compiled once, however many
// ask for it at the same time; a view keeps its files as long as somebody holds the descriptor that came with it.
//
// What fails for a reason that a user is to hear is a *refusal.Error; see identity.NeedFilesError for files that a request still lacks.
//
// A Cache may be used by any number of goroutines. Start reading at Cache.Acquire (acquire.go), which is the
// whole flow of a request in one function; package identity says what makes two requests equal, lookup.go what a hit
// checks, compile.go how a miss becomes a build, package failure what becomes of one that does not, and package views what the answer's directory is.
// Stored answers from a store that no daemon has, by the same look-up (stored.go).
package cache
