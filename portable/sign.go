package portable

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"time"

	"lukechampine.com/blake3"
)

// The types of a statement, of its predicate, and of the envelope around it.
const (
	statementType = "https://in-toto.io/Statement/v1"
	PredicateType = "https://epcached.org/build/v1"
	payloadType   = "application/vnd.in-toto+json"
)

// Predicate is the signed statement about the manifest.
type Predicate struct {
	BuildKey Hash `json:"buildKey"`
	// Requests that the build answers; the first is the one that made it.
	Requests       []Request `json:"requests"`
	Files          []File    `json:"files"`
	MachineClass   string    `json:"machineClass,omitempty"` // of the machine that compiled it
	Builder        string    `json:"builder,omitempty"`
	CompileSeconds float64   `json:"compileSeconds"`
	Issued         time.Time `json:"issued"`
	NotAfter       time.Time `json:"notAfter,omitzero"` // zero: it does not expire

	allowed []string // the request keys that its key is limited to; none: all
}

// Request is a request that a build answers.
type Request struct {
	Key    Hash   `json:"key"`
	Record []byte `json:"record"` // the key is its digest
}

// maxRequests bounds the requests of one statement.
const maxRequests = 16

// RequestOf returns the request of a record.
func RequestOf(record []byte) Request { return Request{blake3.Sum256(record), record} }

type statement struct {
	Type          string    `json:"_type"`
	Subject       []subject `json:"subject"`
	PredicateType string    `json:"predicateType"`
	Predicate     Predicate `json:"predicate"`
}

type subject struct {
	Name   string            `json:"name"`
	Digest map[string]string `json:"digest"`
}

// bundle is a sigstore bundle v0.3 with a DSSE envelope, signed by a key that has no certificate.
type bundle struct {
	MediaType string   `json:"mediaType"`
	Material  material `json:"verificationMaterial"`
	Envelope  envelope `json:"dsseEnvelope"`

	file string // for errors
}

type material struct {
	PublicKey struct {
		Hint string `json:"hint"`
	} `json:"publicKey"`
}

type envelope struct {
	Payload     []byte      `json:"payload"`
	PayloadType string      `json:"payloadType"`
	Signatures  []signature `json:"signatures"`
}

type signature struct {
	Sig []byte `json:"sig"`
}

// parseBundle reads a bundle of at most most bytes with a payload of that type.
func parseBundle(file string, raw []byte, most int, payload string) (*bundle, error) {
	b := &bundle{file: file}
	if err := decode(file, raw, most, b); err != nil {
		return nil, err
	}
	switch {
	case b.MediaType != MediaBundle:
		return nil, wrong(file, "mediaType", "%.80q, not %q", b.MediaType, MediaBundle)
	case b.Envelope.PayloadType != payload:
		return nil, wrong(file, "payloadType", "%.80q, not %q", b.Envelope.PayloadType, payload)
	case len(b.Envelope.Signatures) != 1:
		return nil, wrong(file, "signatures", "%d, not 1", len(b.Envelope.Signatures))
	}
	return b, nil
}

// statement reads the signed statement, and compares it with the card. It is not trusted before the
// signature is verified.
func (b *bundle) statement(c *Card) (*Predicate, error) {
	var s statement
	file := b.file + ": payload"
	if err := decode(file, b.Envelope.Payload, maxCard, &s); err != nil {
		return nil, err
	}
	p := &s.Predicate
	switch {
	case s.Type != statementType || s.PredicateType != PredicateType:
		return nil, wrong(file, "predicateType", "%.80q in a %.80q", s.PredicateType, s.Type)
	case len(s.Subject) != 1 || len(s.Subject[0].Digest) != 1 ||
		s.Subject[0].Digest["sha256"] != c.Digest.Hex():
		return nil, wrong(file, "subject", "it is not the build's manifest, %s", c.Digest)
	case p.BuildKey != c.Config.BuildKey:
		return nil, wrong(file, "predicate.buildKey", "%s, and the config has %s", p.BuildKey,
			c.Config.BuildKey)
	case len(p.Requests) == 0 || len(p.Requests) > maxRequests:
		return nil, wrong(file, "predicate.requests", "%d, not 1 to %d", len(p.Requests),
			maxRequests)
	case !bytes.Equal(p.Requests[0].Record, c.Config.Record):
		return nil, wrong(file, "predicate.requests[0]", "differs from the request in the config")
	case len(p.Files) != len(c.Config.Files):
		return nil, wrong(file, "predicate.files", "%d, and the config has %d", len(p.Files),
			len(c.Config.Files))
	}
	for i, r := range p.Requests {
		if RequestOf(r.Record).Key != r.Key || len(r.Record) > maxRecord {
			return nil, wrong(file, fmt.Sprintf("predicate.requests[%d].key", i),
				"it is not its record's")
		}
	}
	for i, f := range p.Files {
		if f != c.Config.Files[i] {
			return nil, wrong(file, fmt.Sprintf("predicate.files[%d]", i),
				"%q differs from the config's", f.Name)
		}
	}
	return p, nil
}

// preAuth returns DSSE's encoding of the bytes to sign.
func preAuth(kind string, payload []byte) []byte {
	head := fmt.Sprintf("DSSEv1 %d %s %d ", len(kind), kind, len(payload))
	return append([]byte(head), payload...)
}

// Signer signs builds, or trust documents. A nil *Signer signs none.
type Signer struct {
	private ed25519.PrivateKey
	ID      string
	Root    bool // signs trust documents only, not builds
}

// key returns the public key of the signer.
func (s *Signer) key() *Key {
	public, _ := s.private.Public().(ed25519.PublicKey)
	return &Key{ID: s.ID, Root: s.Root, public: public}
}

// signature returns the sigstore bundle that signs an encoded manifest, and the manifest that
// attaches the bundle to it.
func (s *Signer) signature(build []byte, p Predicate) (one, manifest []byte) {
	digest := DigestOf(build)
	payload := encode(&statement{Type: statementType, PredicateType: PredicateType, Predicate: p,
		Subject: []subject{{"b-" + p.BuildKey.String(),
			map[string]string{"sha256": digest.Hex()}}}})
	one = s.seal(payloadType, payload)
	return one, encode(&Manifest{SchemaVersion: 2, MediaType: MediaManifest,
		ArtifactType: MediaBundle, Config: emptyConfig(),
		Layers:  []Descriptor{descriptorOf(MediaBundle, one)},
		Subject: &Descriptor{MediaType: MediaManifest, Digest: digest, Size: int64(len(build))}})
}

// seal returns the sigstore bundle of a payload.
func (s *Signer) seal(kind string, payload []byte) []byte {
	b := bundle{MediaType: MediaBundle, Envelope: envelope{Payload: payload, PayloadType: kind,
		Signatures: []signature{{ed25519.Sign(s.private, preAuth(kind, payload))}}}}
	b.Material.PublicKey.Hint = s.ID
	return encode(&b)
}

// Verify returns the signer's own statement in a card: see Trust.Verify.
func (s *Signer) Verify(c *Card, now time.Time) (*Predicate, error) {
	p, _, err := (&Trust{Keys: []*Key{s.key()}}).Verify(c, now)
	return p, err
}

// Sign returns a card of the same build with the signer's statement only.
func (s *Signer) Sign(c *Card, p Predicate) []byte {
	if s == nil {
		return newCard(c.Build)
	}
	_, manifest := s.signature(c.Build, p)
	return newCard(c.Build, manifest)
}

// keyID is the SHA-256 of the public key in its DER form, in hexadecimal digits.
func keyID(public ed25519.PublicKey) (id string, der []byte) {
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		panic("portable: " + err.Error()) // cannot happen with an ed25519 key
	}
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:]), der
}

// The types of PEM blocks with keys.
const (
	pemPrivate = "PRIVATE KEY"
	pemPublic  = "PUBLIC KEY"
)

// rootHeaders mark the keys that sign trust documents.
var rootHeaders = map[string]string{"Role": "root"}

// GenerateKey returns a new key pair as PEM texts, and its id. A root key signs trust documents.
func GenerateKey(root bool) (private, public []byte, id string, err error) {
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, nil, "", err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, "", err
	}
	id, der := keyID(pub)
	var headers map[string]string
	if root {
		headers = rootHeaders
	}
	return pem.EncodeToMemory(&pem.Block{Type: pemPrivate, Headers: headers, Bytes: secret}),
		pem.EncodeToMemory(&pem.Block{Type: pemPublic, Headers: headers, Bytes: der}), id, nil
}

// ReadSigner reads a file with a private key.
func ReadSigner(file string) (*Signer, error) {
	text, err := ReadFile(file, MaxPEM)
	if err != nil {
		return nil, err
	}
	return ParseSigner(file, text)
}

// ParseSigner reads a private key.
func ParseSigner(file string, text []byte) (*Signer, error) {
	block, _ := pem.Decode(text)
	if block == nil || block.Type != pemPrivate {
		return nil, wrong(file, "", "no PEM block %q", pemPrivate)
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, wrong(file, "", "%v", err)
	}
	private, ok := key.(ed25519.PrivateKey)
	if !ok {
		return nil, wrong(file, "", "%T, and builds are signed with ed25519 keys", key)
	}
	public, _ := private.Public().(ed25519.PublicKey)
	id, _ := keyID(public)
	return &Signer{private, id, block.Headers["Role"] == rootHeaders["Role"]}, nil
}
