// Package store owns the state directory. It publishes and removes builds, decides their admission
// by a reservation of space, evicts and packs them, moves damaged blobs to quarantine, and records
// events. Package cache decides what is compiled.
package store
