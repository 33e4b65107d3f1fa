// Package packing keeps the blobs of one store in the representation that serves best for what it
// takes on the disk. Four operations change it:
//
//   - Store.Pack replaces the whole form of a blob by a recipe: ranges of other blobs, its bases,
//     and literals, which no other blob has.
//   - Store.Unpack makes a copy of a packed blob for a request. It is not synced, and may vanish at
//     any time.
//   - Store.MakeWhole stores a packed blob whole again.
//   - Store.Compact makes a blob whole that is used, and packs the idle base that it took from,
//     and what else took from that, again, by matching; or it removes a base that no build needs.
//
// A blob is whole or packed; both at once only while its form is changed, or after a crash, and
// then it is served whole. Bases are whole, and stay as long as a recipe needs them; recipes have
// depth one. Literals are stored as a blob of their own, which later recipes take from, or, where
// none does or would and a sample of them gains an eighth, compressed in the recipe's file.
//
// Package cas keeps the whole forms and the copies, package dedupe the recipes. This package
// knows which forms each blob has, and changes them in an order in which one of them serves the
// blob at any time, also after a crash. It knows digests, files, stamps and space, and nothing of
// what blobs are kept for: its Owner does, which it asks before it removes anything, or has a blob
// take bytes of another one. What was found out about blobs lies in its Memory.
//
// A Store may be used by any number of goroutines. Operations that change the form of a blob take
// the store's turn, one at a time; opening, verifying and copying blobs never blocks on it. What
// is reported as packed, whole or removed is so durably, but for copies.
package packing
