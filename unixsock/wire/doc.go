// Package wire holds the messages that travel between epcached and its clients, generated from
// epcached.proto.
//
// The .proto is the specification of the protocol: each rule is beside its field, and it is
// enough to write a client in another language. Package unixsock carries these messages over a
// socket. The messages of a hit have a faster codec, for fields in the order of their numbers;
// package proto has all others.
package wire

// MaxFrame bounds an envelope: so many bytes at most come after a frame's length.
const MaxFrame = 1 << 20
