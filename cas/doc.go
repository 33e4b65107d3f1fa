// Package cas stores immutable blobs under the digest of their bytes.
//
// A blob is a file of mode 0444 named by the BLAKE3 digest of its plain bytes. Put, PutFile and
// AdoptHashed return only when the bytes and the name are durable: data synced, linked without
// replacing, folder synced. A crash at any step leaves at most a temporary file, which the next
// Open removes; a name in the store never stands over missing or partial bytes.
//
// A blob is hashed when it is stored. Afterwards its Stamp is believed: while device, inode, size
// and times hold, a blob is served without being read; as soon as they differ it is hashed before
// it is served. Changes that the store makes itself (further links for views) renew the stamp.
//
// All methods of a Store may be called at the same time. One process has a
// store open at a time; who sees to that is above this package.
//
// Start with Open, Store.Hold, Hold.Put and Store.Open; the layout on disk is described
// in doc/format.md.
package cas
