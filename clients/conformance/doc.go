// Package conformance holds one list of what a daemon may do to a client, and runs every client
// through it.
//
// testdata/rows.json has the rows: what a scripted daemon sends, and what the client
// has to make of it. A client is a small program, its driver, that reads from standard input what
// to ask for and says on standard output what came of it, a line each. README.md describes both,
// and how a further client is added; doc/protocol.md says why each rule is there.
package conformance
