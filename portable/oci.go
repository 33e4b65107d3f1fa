package portable

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

// Media types and annotations. Layers of other types than MediaFile are not files of the build, and
// are ignored. The chunk list of a large file follows it, as MediaChunks.
const (
	MediaManifest = "application/vnd.oci.image.manifest.v1+json"
	MediaIndex    = "application/vnd.oci.image.index.v1+json"
	MediaEmpty    = "application/vnd.oci.empty.v1+json"

	ArtifactBuild = "application/vnd.epcached.build.v1"
	ArtifactCard  = "application/vnd.epcached.card.v1"
	MediaConfig   = "application/vnd.epcached.build.config.v1+json"
	MediaFile     = "application/vnd.epcached.file.v1+zstd"
	MediaChunks   = "application/vnd.epcached.chunks.v1"
	MediaBundle   = "application/vnd.dev.sigstore.bundle.v0.3+json"

	annotationTitle = "org.opencontainers.image.title"
	annotationRef   = "org.opencontainers.image.ref.name"
)

// Digest is the SHA-256 by which OCI names blobs.
type Digest [sha256.Size]byte

// DigestOf returns the digest of the bytes.
func DigestOf(b []byte) Digest { return sha256.Sum256(b) }

// Hex returns the digest as 64 hexadecimal digits.
func (d Digest) Hex() string { return hex.EncodeToString(d[:]) }

// String returns "sha256:" and 64 hexadecimal digits.
func (d Digest) String() string { return "sha256:" + d.Hex() }

// MarshalText implements encoding.TextMarshaler.
func (d Digest) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Digest) UnmarshalText(b []byte) error {
	digits, ok := strings.CutPrefix(string(b), "sha256:")
	if !ok {
		return fmt.Errorf("digest %.80q is not a SHA-256 digest", b)
	}
	return unhex(d[:], digits)
}

// Hash is a BLAKE3 digest, by which epcached names keys and the bytes of files.
type Hash [32]byte

// String returns 64 hexadecimal digits.
func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// MarshalText implements encoding.TextMarshaler.
func (h Hash) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *Hash) UnmarshalText(b []byte) error { return unhex(h[:], string(b)) }

func unhex(out []byte, digits string) error {
	b, err := hex.DecodeString(digits)
	if err != nil || len(b) != len(out) || strings.ToLower(digits) != digits {
		return fmt.Errorf("digest %.80q is not %d lower-case hexadecimal digits",
			digits, 2*len(out))
	}
	copy(out, b)
	return nil
}

// Descriptor names a blob, and may have its bytes.
type Descriptor struct {
	MediaType    string            `json:"mediaType"`
	Digest       Digest            `json:"digest"`
	Size         int64             `json:"size"`
	Data         []byte            `json:"data,omitempty"`
	Annotations  map[string]string `json:"annotations,omitempty"`
	ArtifactType string            `json:"artifactType,omitempty"`
}

func descriptorOf(media string, data []byte) Descriptor {
	return Descriptor{MediaType: media, Digest: DigestOf(data), Size: int64(len(data)), Data: data}
}

// inline returns the descriptor's inlined bytes.
func (d *Descriptor) inline(file, field, media string) ([]byte, error) {
	switch {
	case d.MediaType != media:
		return nil, wrong(file, field+".mediaType", "%.80q, not %q", d.MediaType, media)
	case int64(len(d.Data)) != d.Size:
		return nil, wrong(file, field+".size", "%d, and %d bytes of data", d.Size, len(d.Data))
	case DigestOf(d.Data) != d.Digest:
		return nil, wrong(file, field+".digest", "%s, and the data has %s", d.Digest,
			DigestOf(d.Data))
	}
	return d.Data, nil
}

// Manifest is an OCI image manifest.
type Manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	ArtifactType  string       `json:"artifactType"`
	Config        Descriptor   `json:"config"`
	Layers        []Descriptor `json:"layers"`
	Subject       *Descriptor  `json:"subject,omitempty"`
}

func (m *Manifest) check(file, artifact string) error {
	switch {
	case m.SchemaVersion != 2:
		return wrong(file, "schemaVersion", "%d, not 2", m.SchemaVersion)
	case m.MediaType != MediaManifest:
		return wrong(file, "mediaType", "%.80q, not %q", m.MediaType, MediaManifest)
	case m.ArtifactType != artifact:
		return wrong(file, "artifactType", "%.80q, not %q", m.ArtifactType, artifact)
	}
	return nil
}

// index is an OCI image index.
type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	ArtifactType  string       `json:"artifactType,omitempty"`
	Manifests     []Descriptor `json:"manifests"`
}

// emptyConfig is the config of manifests that need none.
func emptyConfig() Descriptor { return descriptorOf(MediaEmpty, []byte("{}")) }
