// Package store owns the state directory: it alone decides what is on the disk. It publishes and
// removes builds, reserves space for them, evicts and packs them, marks damage, and writes the
// events of all that. Package cache decides what is compiled, and for which users.
package store
