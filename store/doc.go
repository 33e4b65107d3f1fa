// Package store owns the state directory: it alone decides what is on the disk. It publishes and
// removes builds, decides their admission by a reservation of space, evicts and packs them, moves
// damage to quarantine, and writes the events of all that. Package cache decides what is compiled.
package store
