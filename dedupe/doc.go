// Package dedupe finds what context binaries share, packs and unpacks them
// byte for byte.
//
// Nothing packs yet: this package holds the words, Extent and Recipe, and what
// the design has settled.
//
//   - Maximal extents, not chunks. A hash is rolled over a new blob; at
//     content-defined anchors, about one in 4 KiB, the same anchor is looked up
//     in stored blobs, the bytes are compared, and the match is extended both
//     ways as far as it goes. The variants of a real model share nearly all of
//     their bytes in long runs, but at other offsets: multiples of 4 or 8,
//     rarely of 4096. Fixed blocks find nothing of that.
//   - No trust in a hash: bytes are compared before they count as shared.
//   - Matches shorter than a floor of some KiB stay literals. A longer extent
//     is quicker to rebuild than many short ones, and its recipe is smaller.
//   - Known containers (OVEP_BIN, ONNX initializers and external data,
//     safetensors) are hints: they give extents directly, named by tensor.
//   - Publish first, share later: a new artefact is stored whole and answered;
//     extents are looked for in the background.
//   - A whole blob that recipes refer to is their container and stays while
//     they need it. A recipe's own literals are a container too. Recipes have
//     depth one: what a recipe refers to is never itself packed.
//   - What is unpacked is checked against the blob's digest, so a wrong extent
//     can cost a compile but never gives a wrong artefact.
//   - A private blob may refer to containers of the shared scope or of the same
//     user, never to another user's.
package dedupe
