// Package remote connects the daemon to stores on other machines: it has the protocol of the helper
// process epcached-remote, which transfers the bytes, and its client. The daemon itself opens no
// network connection.
//
// Each call is a Unix connection of its own: one frame with the request and its descriptors, then
// frames of progress, then one with the answer. A frame is a 4-byte little-endian length and JSON;
// both programs are built from the same tree, so the messages have one version and no history. The
// client cancels a call by closing its connection. Under systemd the helper listens at the socket
// of its unit; otherwise the client starts it, and hands it the connections over a socketpair.
//
// The helper is not trusted. It parses everything that remotes send, and checks it, so that most
// damage is found there; but the caller verifies the signature of each card, and the BLAKE3 digest
// of each file that was fetched, before either counts.
//
// A circuit breaker for each remote makes calls fail at once after three failures in a row, until
// it lets one call probe. All methods of a Client may be called at the same time. Every error
// matches one of ErrMissing, ErrRefused, ErrUnreachable, ErrDamaged, ErrUnsupported and ErrLocal,
// or is that of the caller's context.
//
// Start reading at Client.
package remote
