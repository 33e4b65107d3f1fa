package portable

import (
	"crypto/ed25519"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"
	"unicode"
)

// MediaTrust is the payload type of a trust document's signature, so that a signature of a build is
// never valid for a document.
const MediaTrust = "application/vnd.epcached.trust.v1+json"

// DocumentDays is how long a trust document is valid by default.
const DocumentDays = 7

// Document is a trust document: which keys and builds a root key revokes. The document with the
// highest sequence number of a key is in effect.
type Document struct {
	Version  int          `json:"version"` // 1
	Sequence uint64       `json:"sequence"`
	Issued   time.Time    `json:"issued"`
	Expires  time.Time    `json:"expires"`
	Revoked  []Revocation `json:"revoked"`
}

// Revocation revokes one key, OCI manifest or build key. One of the three is set.
type Revocation struct {
	Key      string `json:"key,omitempty"`
	Manifest Digest `json:"manifest,omitzero"`
	Build    Hash   `json:"build,omitzero"`
	Reason   string `json:"reason"`
}

// Bounds of a trust document.
const (
	maxDocument = 256 << 10
	maxReason   = 200
)

// String names the revoked key, manifest or build.
func (r *Revocation) String() string {
	switch {
	case r.Key != "":
		return "key " + ShortID(r.Key)
	case r.Build != Hash{}:
		return "build " + r.Build.String()
	}
	return "manifest " + r.Manifest.String()
}

// Same reports whether both revoke the same thing.
func (r *Revocation) Same(other *Revocation) bool {
	return r.Key == other.Key && r.Manifest == other.Manifest && r.Build == other.Build
}

// Why returns why a build that the key signed is revoked, "" if it is not. Builds that an earlier
// version stored may have several ids in keyIDs, with commas between them.
func (d *Document) Why(keyIDs string, manifest Digest, build Hash) string {
	for i := range d.Revoked {
		r := &d.Revoked[i]
		switch {
		case r.Key != "" && slices.Contains(strings.Split(keyIDs, ","), r.Key),
			r.Build != Hash{} && r.Build == build,
			r.Manifest != Digest{} && r.Manifest == manifest:
			return fmt.Sprintf("%s is revoked: %s", r, r.Reason)
		}
	}
	return ""
}

func (d *Document) check(file string) error {
	switch {
	case d.Version != 1:
		return wrong(file, "version", "%d, not 1: a newer epcached may read it", d.Version)
	case d.Sequence == 0:
		return wrong(file, "sequence", "it is 0")
	case !d.Expires.After(d.Issued):
		return wrong(file, "expires", "it is not after the document was issued")
	}
	for i := range d.Revoked {
		r, some := &d.Revoked[i], 0
		for _, set := range []bool{r.Key != "", r.Manifest != Digest{}, r.Build != Hash{}} {
			if set {
				some++
			}
		}
		if some != 1 || r.Key != "" && new(Hash).UnmarshalText([]byte(r.Key)) != nil ||
			len(r.Reason) > maxReason || strings.ContainsFunc(r.Reason, unicode.IsControl) {
			return wrong(file, fmt.Sprintf("revoked[%d]", i),
				"not one key, manifest or build, with a reason of at most %d bytes", maxReason)
		}
	}
	return nil
}

// ParseDocument reads a trust document, which one of the root keys among keys has to have signed.
// The caller checks its expiry and its sequence number.
func ParseDocument(file string, raw []byte, keys []*Key) (*Document, *Key, error) {
	b, err := parseBundle(file, raw, maxDocument, MediaTrust)
	if err != nil {
		return nil, nil, err
	}
	hint := b.Material.PublicKey.Hint
	i := slices.IndexFunc(keys, func(k *Key) bool { return k.Root && k.ID == hint })
	if i < 0 {
		return nil, nil, distrust(
			"the trust document is signed by %.16q, which is no trusted root key", hint)
	}
	k := keys[i]
	if !ed25519.Verify(k.public, preAuth(MediaTrust, b.Envelope.Payload),
		b.Envelope.Signatures[0].Sig) {
		return nil, nil, wrong(file, "signatures[0].sig", "key %s did not sign this document",
			k.Short())
	}
	d := new(Document)
	if err := decode(file+": payload", b.Envelope.Payload, maxDocument, d); err != nil {
		return nil, nil, err
	}
	return d, k, d.check(file + ": payload")
}

// maxDocuments bounds the trust documents of a bundle.
const maxDocuments = 4

// AddDocument puts a trust document into the layout, and replaces one of the same root key.
func (w *Writer) AddDocument(raw []byte) error {
	b, err := parseBundle("trust document", raw, maxDocument, MediaTrust)
	if err != nil {
		return err
	}
	manifest := encode(&Manifest{SchemaVersion: 2, MediaType: MediaManifest,
		ArtifactType: MediaTrust, Config: emptyConfig(),
		Layers: []Descriptor{descriptorOf(MediaBundle, raw)}})
	for _, blob := range [][]byte{emptyConfig().Data, raw, manifest} {
		if err := w.write(path.Join(blobsDir, DigestOf(blob).Hex()), blob); err != nil {
			return err
		}
	}
	d := descriptorOf(MediaManifest, manifest)
	d.Data, d.ArtifactType = nil, MediaTrust
	w.replace("trust-"+ShortID(b.Material.PublicKey.Hint), d)
	return nil
}

// document reads a trust document, which is not verified. It returns nil for an unreadable one,
// which counts as missing.
func (b *Bundle) document(d *Descriptor) []byte {
	raw, err := b.file(path.Join(blobsDir, d.Digest.Hex()), maxDocument*2)
	var m Manifest
	if err != nil || DigestOf(raw) != d.Digest || decode("", raw, maxDocument*2, &m) != nil ||
		m.check("", MediaTrust) != nil || len(m.Layers) != 1 {
		return nil
	}
	out, _ := m.Layers[0].inline("", "", MediaBundle)
	return out
}

// ReadDocument reads a trust document that the root key signed.
func (s *Signer) ReadDocument(raw []byte) (*Document, error) {
	d, _, err := ParseDocument("trust document", raw, []*Key{s.key()})
	return d, err
}

// SignDocument returns the signed and encoded trust document.
func (s *Signer) SignDocument(d Document) ([]byte, error) {
	d.Version = 1
	d.Issued = d.Issued.UTC().Truncate(time.Second)
	d.Expires = d.Expires.UTC().Truncate(time.Second)
	if d.Revoked == nil {
		d.Revoked = []Revocation{}
	}
	if !s.Root {
		return nil, fmt.Errorf("key %s is no root key: epcachectl trust keygen --root makes one",
			ShortID(s.ID))
	}
	raw := s.seal(MediaTrust, encode(&d))
	_, err := s.ReadDocument(raw) // checks that the result is readable
	return raw, err
}
