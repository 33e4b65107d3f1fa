// Package unixsock carries requests between applications and epcached over a Unix socket: frames,
// file descriptors, the peer's identity, limits and deadlines. It declares the requests and the
// backend that answers them, and knows no storage.
//
// A frame is a 4-byte little-endian length, 1 to 1 MiB, and that many bytes of one wire.Envelope;
// descriptors travel with its first byte. wire/epcached.proto has the rules beside the fields
// they belong to.
//
// Promises: memory is allocated only for bytes that have arrived, not for lengths that a peer
// states; every descriptor that arrives is closed on every path, also when its frame is bad; a peer
// that does not read, does not finish a frame, or asks for too much loses its own connection only.
// Requests of one connection run at the same time and are answered in any order. An error matches
// the same errors.Is on both ends.
//
// Start at Server with Backend for the daemon's end, and at Dial, Client.Acquire and Ask for the
// client's; package clients/epcache loads builds with it.
package unixsock
