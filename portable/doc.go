// Package portable is the form in which a build leaves a machine: OCI manifests and blobs in an
// image layout, as a directory or a tar, under an ed25519 signature in a sigstore bundle.
//
// A build is a manifest: its config is what is known of the build, its layers are the files, each
// compressed by zstd. A card is an image index with the build's manifest and those of its
// signatures, all inlined, so that one read gives everything but the files. The signature is of an
// in-toto statement, which binds the manifest, the build key and the request keys that the build
// answers to the BLAKE3 digest of each file. doc/format.md has the formats.
//
// Nothing here is trusted before Trust.Verify. Each document of ours has one spelling: what is read
// is encoded again and must be the same bytes. Parsers are bounded, and their errors name the file,
// the field and the offset. The package knows no store and no daemon.
//
// Start reading at Writer, Bundle and ParseCard.
package portable
