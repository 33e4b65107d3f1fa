// Package portable reads and writes exported builds: OCI manifests and blobs in an image layout, as
// a directory or a tar, with ed25519 signatures in sigstore bundles.
//
// A build is a manifest: its config describes the build, and its layers are the files, each
// compressed by zstd. A card is an image index with the build's manifest and those of its
// signatures, all inlined, so that one read returns everything but the files. The signature is of
// an in-toto statement, which binds the manifest, the build key and the request keys that the build
// answers to the BLAKE3 digest of each file. doc/format.md has the formats.
//
// Data are not trusted before Trust.Verify. epcached's own documents have one encoding: a document
// is encoded again after reading, and must give the same bytes. Parsers are bounded, and their
// errors name file, field and offset. The package does not depend on a store or a daemon.
//
// Start reading at Writer, Bundle and ParseCard.
package portable
