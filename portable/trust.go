package portable

import (
	"cmp"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Key is a trusted public key with its restrictions. These are headers of its PEM block, with
// commas between values: "EPs", "Builders", "Requests"; "Not-After" is a date. "Role: root" marks a
// key that signs trust documents and not builds.
type Key struct {
	ID   string
	File string // that contains it

	EPs      []string // only for builds of these execution providers; none: all
	Builders []string // only for builds of these builders
	Requests []string // only for these request keys; a build's others are not used
	NotAfter time.Time
	Root     bool

	public ed25519.PublicKey
}

// Short returns the beginning of the key's id, for people.
func (k *Key) Short() string { return ShortID(k.ID) }

// ShortID returns the beginning of a key's id, for people.
func ShortID(id string) string { return id[:min(len(id), 16)] }

// ReadKeys reads files of public keys.
func ReadKeys(files []string) (all []*Key, err error) {
	for _, file := range files {
		text, err := ReadFile(file, MaxPEM)
		var keys []*Key
		if err == nil {
			keys, err = ParseKeys(file, text)
		}
		if err != nil {
			return nil, fmt.Errorf("trusted key: %w", err)
		}
		all = append(all, keys...)
	}
	return all, nil
}

// ParseKeys reads the public keys of one file.
func ParseKeys(file string, text []byte) (keys []*Key, err error) {
	if len(text) > MaxPEM {
		return nil, wrong(file, "", "%d bytes, more than %d", len(text), MaxPEM)
	}
	for rest := text; ; {
		block, after := pem.Decode(rest)
		if block == nil {
			break
		}
		at := int64(len(text) - len(rest))
		rest = after
		k, err := parseKey(file, block)
		if err != nil {
			err.Offset = at
			return nil, err
		}
		keys = append(keys, k)
	}
	if len(keys) == 0 {
		return nil, wrong(file, "", "no PEM block %q", pemPublic)
	}
	return keys, nil
}

func parseKey(file string, block *pem.Block) (*Key, *FormatError) {
	if block.Type == pemPrivate {
		return nil, wrong(file, "", "a private key: the trust set has public ones, FILE.pub")
	}
	if block.Type != pemPublic {
		return nil, wrong(file, "", "a PEM block %.40q, not %q", block.Type, pemPublic)
	}
	any, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		return nil, wrong(file, "", "%v", err)
	}
	public, ok := any.(ed25519.PublicKey)
	if !ok {
		return nil, wrong(file, "", "%T, and builds are signed with ed25519 keys", any)
	}
	k := &Key{File: file, public: public}
	k.ID, _ = keyID(public)
	for name, value := range block.Headers {
		list := strings.FieldsFunc(value, func(r rune) bool { return r == ',' || r == ' ' })
		if len(list) == 0 {
			return nil, wrong(file, name, "it is empty")
		}
		switch name {
		case "EPs":
			k.EPs = list
		case "Builders":
			k.Builders = list
		case "Requests":
			k.Requests = list
		case "Not-After":
			if k.NotAfter, err = ParseDate(value); err != nil {
				return nil, wrong(file, name, "%v", err)
			}
		case "Role":
			if k.Root = value == rootHeaders["Role"]; !k.Root {
				return nil, wrong(file, name, "%.40q, not root", value)
			}
		default: // refused, because an unknown restriction must not be ignored
			return nil, wrong(file, name,
				"no such bound: there are EPs, Builders, Requests, Not-After and Role")
		}
	}
	if k.Root && len(k.EPs)+len(k.Builders)+len(k.Requests) > 0 {
		return nil, wrong(file, "Role", "a root key signs no builds, and cannot be limited to some")
	}
	return k, nil
}

// ParseDate reads a date, or a time in RFC 3339. A date means its end, in UTC.
func ParseDate(text string) (time.Time, error) {
	if t, err := time.Parse(time.DateOnly, text); err == nil {
		return t.Add(24*time.Hour - time.Second), nil
	}
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return t, fmt.Errorf("%.40q is neither a date, 2027-01-31, nor a time in RFC 3339", text)
	}
	return t.UTC(), nil
}

// Trust decides which signatures count.
type Trust struct {
	Keys []*Key
	// Revoked returns why a build with a valid signature is revoked, "" if it is not; may be nil.
	Revoked func(keyID string, manifest Digest, build Hash) string
}

// TrustError says why a card is not trusted, with the remedy. The card is not damaged.
type TrustError struct{ Text, Hint string }

func distrust(format string, args ...any) *TrustError {
	return &TrustError{Text: fmt.Sprintf(format, args...)}
}

// Error returns the reason.
func (e *TrustError) Error() string { return e.Text }

// Verify returns the statement of a trusted key about the build, and the key's id. The statement
// has only the requests that the key is trusted for. If no signature counts, the error says why the
// first one does not.
func (t *Trust) Verify(c *Card, now time.Time) (*Predicate, string, error) {
	why := error(nil)
	for _, b := range c.bundles {
		p, k, err := t.verify(c, b, now)
		if err == nil {
			return p, k.ID, nil
		}
		why = cmp.Or(why, err)
	}
	unsigned := &TrustError{"it is not signed", "sign it: epcachectl export --key FILE"}
	return nil, "", cmp.Or(why, error(unsigned))
}

func (t *Trust) verify(c *Card, b *bundle, now time.Time) (*Predicate, *Key, error) {
	hint := b.Material.PublicKey.Hint
	i := slices.IndexFunc(t.Keys, func(k *Key) bool { return k.ID == hint })
	if i < 0 {
		return nil, nil, &TrustError{fmt.Sprintf("signed by %.16q, not trusted here", hint),
			"trust the public key: import --trust FILE.pub, or trust = [\"FILE.pub\"] in the " +
				"configuration"}
	}
	k, signed := t.Keys[i], preAuth(payloadType, b.Envelope.Payload)
	if k.Root {
		return nil, nil, distrust("signed by %s, a root key, which signs no builds", k.Short())
	}
	if !ed25519.Verify(k.public, signed, b.Envelope.Signatures[0].Sig) {
		return nil, nil, wrong(b.file, "signatures[0].sig",
			"key %s did not sign this document", k.Short())
	}
	p, err := b.statement(c)
	if err != nil {
		return nil, nil, err
	}
	if why := k.refuses(c, p, now); why != "" {
		return nil, nil, distrust("signed by %s, %s", k.Short(), why)
	}
	if t.Revoked != nil {
		if why := t.Revoked(k.ID, c.Digest, p.BuildKey); why != "" {
			return nil, nil, distrust("signed by %s, and revoked: %s", k.Short(), why)
		}
	}
	p.allowed = k.Requests
	p.Requests = slices.DeleteFunc(p.Requests, func(r Request) bool { return !p.Answers(r.Key) })
	return p, k, nil
}

// outside reports whether a list of a key's limits lacks a value. An empty list limits nothing.
func outside(may []string, is string) bool { return len(may) > 0 && !slices.Contains(may, is) }

// Answers reports whether the key that signed the statement is trusted for the request.
func (p *Predicate) Answers(request Hash) bool { return !outside(p.allowed, request.String()) }

// refuses returns why the key's signature does not count for the build, "" if it does.
func (k *Key) refuses(c *Card, p *Predicate, now time.Time) string {
	switch {
	case !k.NotAfter.IsZero() && now.After(k.NotAfter):
		return "which is trusted until " + k.NotAfter.Format(time.RFC3339)
	case !p.NotAfter.IsZero() && now.After(p.NotAfter):
		return "and expired on " + p.NotAfter.Format(time.RFC3339)
	case outside(k.Builders, p.Builder):
		return fmt.Sprintf("which is not trusted for builder %.80q", p.Builder)
	case !slices.ContainsFunc(p.Requests, func(r Request) bool {
		return !outside(k.Requests, r.Key.String())
	}):
		return "which is not trusted for this request"
	}
	for _, ep := range c.Config.EPs {
		if outside(k.EPs, ep.Name) {
			return "which is not trusted for " + ep.Name
		}
	}
	return ""
}
