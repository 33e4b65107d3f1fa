// Package dedupe finds what context binaries share, packs and unpacks them
// byte for byte.
//
// A Recipe rebuilds a packed blob from extents: ranges of other blobs, its
// containers, which stand whole in the store. What stands nowhere else is a
// container too, the recipe's own literals, which later recipes may use
// directly. Recipes have depth one: what a recipe refers to is never itself
// packed. A short run that is repeated, such as zeros, is one extent with a
// period. Or a recipe has its own literals in its own file, compressed, for
// itself alone (Frames). doc/format.md has the bytes of a recipe.
//
// A Sketch is a few hundred numbers that tell which stored blobs are likely to
// share bytes with a new one; Candidates ranks them in memory that does not
// depend on how many there are. A sketch decides where to look and nothing
// else: no hash is trusted to say that bytes are equal.
//
// Match finds the extents. It reads the target once and lists its anchors,
// positions that the bytes themselves choose, about one in a KiB; then it goes
// through each candidate, and where an anchor stands in both, compares the bytes
// both ways as far as they are equal. What the target has twice counts too.
// Runs without anchors, such as zeros, are shared where they stand beside
// something that is.
//
// Recipes that are read are foreign bytes: DecodeRecipe accepts only what is
// sound in itself, and Apply hashes what comes out, so a wrong extent or a
// wrong container can cost a compile but never gives a wrong artefact. With
// ApplyOptions.Trusted, which is for containers with valid stamps, nothing is
// hashed.
//
// Who may refer to whose containers is for the caller to see to: a private blob
// may use those of the shared scope or of the same user, never another user's.
//
// All functions may be called at the same time, also with the same Recipe,
// which nothing here changes. Start with Match, Candidates and Apply.
package dedupe
