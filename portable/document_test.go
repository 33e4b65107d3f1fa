package portable

import (
	"bytes"
	"context"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func rootOf(t testing.TB) (*Signer, []*Key) {
	private, public, _, err := GenerateKey(true)
	require.NoError(t, err)
	s, trust := signer(t, private, public, "")
	require.True(t, s.Root)
	return s, trust.Keys
}

func document(revoked ...Revocation) Document {
	return Document{Sequence: 7, Issued: issued, Expires: issued.AddDate(0, 0, DocumentDays),
		Revoked: revoked}
}

func TestATrustDocumentIsSignedByARootKeyAlone(t *testing.T) {
	root, keys := rootOf(t)
	one := Revocation{Key: root.ID, Reason: "it was leaked"}
	raw, err := root.SignDocument(document(one, Revocation{Build: Hash{1}, Reason: "bad"},
		Revocation{Manifest: Digest{2}, Reason: "worse"}))
	require.NoError(t, err)
	d, k, err := ParseDocument("trust", raw, keys)
	require.NoError(t, err)
	require.Equal(t, root.ID, k.ID)
	require.EqualValues(t, 7, d.Sequence)
	require.Contains(t, d.Why("aa,"+root.ID, Digest{}, Hash{}), "it was leaked")
	require.Contains(t, d.Why("aa", Digest{}, Hash{1}), "is revoked: bad")
	require.Contains(t, d.Why("aa", Digest{2}, Hash{}), "is revoked: worse")
	require.Empty(t, d.Why("aa", Digest{}, Hash{}), "a zero digest is of nothing")

	ci, trust := newSigner(t, "")
	_, err = ci.SignDocument(document())
	require.ErrorContains(t, err, "no root key")
	ci.Root = true // as if an attacker had the key of CI
	forged, err := ci.SignDocument(document())
	require.NoError(t, err)
	_, _, err = ParseDocument("trust", forged, append(keys, trust.Keys...))
	require.ErrorContains(t, err, "no trusted root key")

	dir, _ := bundled(t, build(root))
	_, err = imported(dir, &Trust{Keys: keys})
	require.ErrorContains(t, err, "a root key, which signs no builds")
	_, public, _, err := GenerateKey(true)
	require.NoError(t, err)
	_, err = ParseKeys("k.pub", bytes.Replace(public, []byte("Role: root\n"),
		[]byte("Role: root\nEPs: QNNExecutionProvider\n"), 1))
	require.ErrorContains(t, err, "cannot be limited")
}

func TestWrongTrustDocumentsAreRefused(t *testing.T) {
	root, keys := rootOf(t)
	for want, change := range map[string]func(*Document){
		"sequence":   func(d *Document) { d.Sequence = 0 },
		"expires":    func(d *Document) { d.Expires = d.Issued },
		"revoked[0]": func(d *Document) { d.Revoked = []Revocation{{Reason: "nothing"}} },
		"a reason of at most": func(d *Document) {
			d.Revoked = []Revocation{{Key: "short", Reason: "x"}}
		},
	} {
		d := document()
		change(&d)
		_, err := root.SignDocument(d)
		require.ErrorContains(t, err, want)
	}
	d := document()
	d.Version = 2
	_, _, err := ParseDocument("trust", root.seal(MediaTrust, encode(&d)), keys)
	require.ErrorContains(t, err, "a newer epcached may read it")
	_, _, err = ParseDocument("trust", root.seal(payloadType, encode(&d)), keys)
	require.ErrorContains(t, err, "payloadType")
}

func TestEachFlippedByteOfATrustDocumentIsRefused(t *testing.T) {
	root, keys := rootOf(t)
	raw, err := root.SignDocument(document(Revocation{Build: Hash{1}, Reason: "bad"}))
	require.NoError(t, err)
	for i := range raw {
		for _, bit := range []byte{1, 0x20, 0x80} {
			flipped := bytes.Clone(raw)
			flipped[i] ^= bit
			_, _, err := ParseDocument("trust", flipped, keys)
			require.Error(t, err, "byte %d", i)
		}
		_, _, err := ParseDocument("trust", raw[:i], keys)
		require.Error(t, err, "%d bytes", i)
	}
}

func FuzzDocument(f *testing.F) {
	s, trust := sameSigner(f)
	s.Root, trust.Keys[0].Root = true, true
	raw, err := s.SignDocument(document(Revocation{Build: Hash{1}, Reason: "bad"}))
	require.NoError(f, err)
	f.Add(raw)
	f.Fuzz(func(t *testing.T, other []byte) {
		if _, _, err := ParseDocument("trust", other, trust.Keys); err == nil {
			require.Equal(t, raw, other)
		}
	})
}

// A card has the signature of the last export. One of an earlier version may have several, and any
// of a trusted key counts.
func TestOneSignatureCounts(t *testing.T) {
	a, trust := newSigner(t, "")
	b, other := newSigner(t, "Requests: "+RequestOf([]byte("other")).Key.String())
	dir, _ := bundled(t, build(a))
	w, err := Create(dir)
	require.NoError(t, err)
	last, err := w.Add(context.Background(), build(b))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	require.Equal(t, []string{b.ID}, last.Signers())
	_, err = imported(dir, trust)
	require.ErrorContains(t, err, "not trusted here")

	says, _, err := other.Verify(last, issued)
	require.NoError(t, err)
	says.Requests = append([]Request{RequestOf(last.Config.Record)}, says.Requests...)
	_, first := a.signature(last.Build, *says)
	_, second := b.signature(last.Build, *says)
	both, err := ParseCard("card", newCard(last.Build, first, second))
	require.NoError(t, err)
	require.Equal(t, []string{a.ID, b.ID}, both.Signers())
	for _, signer := range []*Signer{a, b} {
		one := map[*Signer]*Trust{a: trust, b: other}[signer]
		_, id, err := one.Verify(both, issued)
		require.NoError(t, err)
		require.Equal(t, signer.ID, id)
	}
	trust.Keys = append(trust.Keys, other.Keys...)
	trust.Revoked = func(id string, _ Digest, _ Hash) string {
		return map[string]string{a.ID: "leaked"}[id]
	}
	says, id, err := trust.Verify(both, issued)
	require.NoError(t, err)
	require.Equal(t, b.ID, id)
	require.Len(t, says.Requests, 1, "the limits are those of the key that counts")
	unsigned, err := ParseCard("card", (*Signer)(nil).Sign(both, Predicate{}))
	require.NoError(t, err)
	require.Empty(t, unsigned.Signers())
}

// A bundle carries trust documents, one of each root key, as a directory and as a tar.
func TestABundleCarriesTrustDocuments(t *testing.T) {
	root, _ := rootOf(t)
	s, trust := newSigner(t, "")
	dir, _ := bundled(t, build(s))
	var last []byte
	for n := range uint64(2) {
		d := document()
		d.Sequence += n
		raw, err := root.SignDocument(d)
		require.NoError(t, err)
		w, err := Create(dir)
		require.NoError(t, err)
		require.NoError(t, w.AddDocument(raw))
		require.ErrorContains(t, w.AddDocument([]byte("{}")), "trust document")
		require.NoError(t, w.Close())
		last = raw
	}
	var archive bytes.Buffer
	require.NoError(t, WriteTar(context.Background(), &archive, dir))
	for _, from := range []string{dir, inFile(t, archive.Bytes())} {
		b, err := Open(context.Background(), from)
		require.NoError(t, err)
		require.Equal(t, [][]byte{last}, b.Documents)
		require.NoError(t, b.Close())
		_, err = imported(from, trust)
		require.NoError(t, err)
	}
	name := inFile(t, archive.Bytes())
	for i := 0; i < archive.Len(); i += *stride {
		flipped := bytes.Clone(archive.Bytes())
		flipped[i] ^= 0x11
		require.NoError(t, os.WriteFile(name, flipped, 0o600))
		b, err := Open(context.Background(), name)
		if err != nil {
			continue
		}
		for _, raw := range b.Documents {
			require.Equal(t, last, raw, "byte %d", i)
		}
		require.NoError(t, b.Close())
	}
}
