// Package index maps requests to the builds that answer them.
//
// One manifest a build, and a journal with pins and tombstones, are the truth. The database
// index.db is made from them, and Open makes it again when it is missing, damaged or of another
// schema. Only the memo, last use, counters, stamps and views are lost with it, all of which are
// made again in use. Damage that is found after Open ends the use of the index, see BrokenError.
//
// Builds that Commit publishes and retracts are durable when it returns: the manifest is the commit
// point both ways. So are states and pins when Journal.Mark returns. Everything else (memos, views,
// stamps, uses, counters, events) is kept in memory and written a few seconds later and at Close.
//
// All methods of an Index may be called at the same time. The results of Lookup, Get and Each are
// shared, so callers must not change them. One process has an index open at a time.
//
// Start with Open, Index.Stage, Index.Commit and Index.Lookup; the layout on disk is
// described in doc/format.md.
package index
