// Package index maps requests to the builds that answer them.
//
// The authoritative data are one manifest for each build, and a journal with states, pins and
// tombstones. The database index.db is derived from them, and Open rebuilds it when it is missing,
// damaged or of another schema. Then only memos, last uses, counters, stamps and views are lost,
// which are made again in use. If damage is found after Open, all further calls fail, see
// BrokenError.
//
// Builds that Commit publishes and retracts are durable when it returns: the manifest is the commit
// point both ways. So are states and pins when Journal.Mark returns. Everything else (memos, views,
// stamps, uses, counters, events) is kept in memory and written a few seconds later and at Close.
//
// An Index is safe for concurrent use. The results of Lookup, Get and Each are shared, so callers
// must not change them. One process has an index open at a time.
//
// Start with Open, Index.Stage, Index.Commit and Index.Lookup; the layout on disk is
// described in doc/format.md.
package index
