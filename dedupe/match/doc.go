// Package match finds what context binaries share.
//
// A Sketch is a few hundred numbers that tell which stored blobs are likely to share bytes with a
// new one; Candidates ranks them in memory that does not depend on how many there are. A sketch
// decides where to look and nothing else: no hash is trusted to say that bytes are equal.
//
// Find finds the extents of a recipe. It reads the target once and lists its anchors, positions
// that the bytes themselves choose, about one in a KiB; then it goes through each candidate, and
// where an anchor stands in both, compares the bytes both ways as far as they are equal. What the
// target has twice counts too. Runs without anchors, such as zeros, are shared where they stand
// beside something that is.
//
// Who may refer to whose containers is for the caller to see to: a private blob
// may use those of the shared scope or of the same user, never another user's.
//
// All functions may be called at the same time. Start with Find and Candidates.
package match
