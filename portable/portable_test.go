package portable

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
)

// A test flips every so manieth byte of a tar; 1 takes half a minute.
var stride = flag.Int("flip-stride", 97, "flip every so manieth byte of a tar")

var issued = time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)

func newSigner(t testing.TB, headers string) (*Signer, *Trust) {
	private, public, _, err := GenerateKey(false)
	require.NoError(t, err)
	return signer(t, private, public, headers)
}

// sameSigner has one key in all processes of a fuzzer, because inputs travel between them.
func sameSigner(t testing.TB) (*Signer, *Trust) {
	key := ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	private, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	require.NoError(t, err)
	return signer(t, pem.EncodeToMemory(&pem.Block{Type: pemPrivate, Bytes: private}),
		pem.EncodeToMemory(&pem.Block{Type: pemPublic, Bytes: public}), "")
}

func signer(t testing.TB, private, public []byte, headers string) (*Signer, *Trust) {
	s, err := ParseSigner("k.key", private)
	require.NoError(t, err)
	if headers != "" {
		public = bytes.Replace(public, []byte("KEY-----\n"), []byte("KEY-----\n"+headers+"\n\n"), 1)
	}
	keys, err := ParseKeys("k.pub", public)
	require.NoError(t, err)
	require.Equal(t, s.ID, keys[0].ID)
	return s, &Trust{Keys: keys}
}

// contents are the files of the build that build makes.
var contents = map[string]string{"a_ctx.onnx": "a graph",
	"sub/a.bin": strings.Repeat("weights ", 1<<10), "empty": ""}

func build(s *Signer) *Build {
	b := &Build{Signer: s, Config: Config{BuildKey: Hash{1}, ModelDigest: Hash{2},
		Record:     []byte("record"),
		EPs:        []EP{{Name: "OpenVINOExecutionProvider", Version: "1.8.1", Hardware: "cpu:1"}},
		ORTVersion: "1.28.0",
		Route:      "compile_api", Graph: "a_ctx.onnx", IRVersion: 10},
		Says: Predicate{CompileSeconds: 1.5, Builder: "ci", Issued: issued,
			Requests: []Request{RequestOf([]byte("other"))}}}
	for _, name := range []string{"a_ctx.onnx", "sub/a.bin", "empty"} {
		b.Files = append(b.Files,
			Source{name, int64(len(contents[name])), strings.NewReader(contents[name])})
	}
	return b
}

// bundled exports builds into a directory, and returns it and a tar of it.
func bundled(t testing.TB, builds ...*Build) (dir string, archive []byte) {
	dir = filepath.Join(t.TempDir(), "out")
	w, err := Create(dir)
	require.NoError(t, err)
	for _, b := range builds {
		_, err := w.Add(context.Background(), b)
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	var out bytes.Buffer
	require.NoError(t, WriteTar(context.Background(), &out, dir))
	return dir, out.Bytes()
}

func inFile(t testing.TB, data []byte) string {
	name := filepath.Join(t.TempDir(), "b.tar")
	require.NoError(t, os.WriteFile(name, data, 0o600))
	return name
}

// extract returns the files of a build.
func extract(b *Bundle, c *Card) (map[string]string, error) {
	out := make(map[string]string)
	for i, f := range c.Config.Files {
		var text bytes.Buffer
		if err := b.Extract(context.Background(), c, i, &text, nil); err != nil {
			return nil, err
		}
		out[f.Name] = text.String()
	}
	return out, nil
}

// imported returns the files of the one build that a bundle has and the trust set accepts.
func imported(name string, trust *Trust) (map[string]string, error) {
	b, err := Open(context.Background(), name)
	if err != nil {
		return nil, err
	}
	defer b.Close()
	if len(b.Cards) != 1 {
		return nil, fmt.Errorf("%d cards", len(b.Cards))
	}
	if b.Cards[0].Err != nil {
		return nil, b.Cards[0].Err
	}
	if _, _, err := trust.Verify(b.Cards[0].Card, issued); err != nil {
		return nil, err
	}
	return extract(b, b.Cards[0].Card)
}

func TestABuildComesBackFromADirectoryAndATar(t *testing.T) {
	s, trust := newSigner(t, "")
	dir, archive := bundled(t, build(s))
	for _, from := range []string{dir, inFile(t, archive)} {
		got, err := imported(from, trust)
		require.NoError(t, err)
		require.Equal(t, contents, got)
	}
	b, err := Open(context.Background(), dir)
	require.NoError(t, err)
	defer b.Close()
	says, key, err := trust.Verify(b.Cards[0].Card, issued)
	require.NoError(t, err)
	require.Equal(t, s.ID, key)
	require.Equal(t, []byte("other"), says.Requests[1].Record)
	require.Equal(t, 1.5, says.CompileSeconds)
	require.Less(t, len(b.Cards[0].Raw), 10_000)
}

func TestTwoExportsAreOneDigest(t *testing.T) {
	s, _ := newSigner(t, "")
	other := func() *Build {
		b := build(s)
		b.Config.BuildKey = Hash{0}
		return b
	}
	_, first := bundled(t, build(s), other())
	_, second := bundled(t, other(), build(s))
	require.Equal(t, DigestOf(first), DigestOf(second))
}

func TestABuildIsAddedToALayoutThatIsThere(t *testing.T) {
	s, _ := newSigner(t, "")
	dir, _ := bundled(t, build(s))
	for range 2 { // the second time it takes its own place
		w, err := Create(dir)
		require.NoError(t, err)
		b := build(s)
		b.Config.BuildKey = Hash{9}
		_, err = w.Add(context.Background(), b)
		require.NoError(t, err)
		require.NoError(t, w.Close())
		got, err := Open(context.Background(), dir)
		require.NoError(t, err)
		require.Len(t, got.Cards, 2)
		require.NoError(t, got.Close())
	}
	some := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(some, "diary"), nil, 0o600))
	_, err := Create(some)
	require.ErrorContains(t, err, "neither empty nor an image layout")
}

func TestEachFlippedByteOfACardIsRefused(t *testing.T) {
	s, trust := newSigner(t, "")
	dir, _ := bundled(t, build(s))
	b, err := Open(context.Background(), dir)
	require.NoError(t, err)
	defer b.Close()
	raw := b.Cards[0].Raw
	for i := range raw {
		flipped := bytes.Clone(raw)
		flipped[i] ^= []byte{1, 0x20, 0x80}[i%3]
		c, err := ParseCard("card", flipped)
		if err == nil {
			_, _, err = trust.Verify(c, issued)
		}
		require.Error(t, err, "byte %d", i)
	}
	for n := 0; n < len(raw); n += 13 {
		_, err := ParseCard("card", raw[:n])
		require.Error(t, err)
	}
	_, err = ParseCard("card", append(bytes.Clone(raw), ' '))
	require.ErrorContains(t, err, "canonical form")
}

// A flipped byte of the padding, of times or of modes changes nothing; any other is noticed.
func TestFlippedBytesOfATarAreRefusedOrHarmless(t *testing.T) {
	s, trust := newSigner(t, "")
	_, archive := bundled(t, build(s))
	name := inFile(t, archive)
	refused := 0
	for i := 0; i < len(archive); i += *stride {
		flipped := bytes.Clone(archive)
		flipped[i] ^= 0x11
		require.NoError(t, os.WriteFile(name, flipped, 0o600))
		got, err := imported(name, trust)
		if err != nil {
			refused++
			continue
		}
		require.Equal(t, contents, got, "byte %d", i)
	}
	require.Positive(t, refused)
}

func TestATruncatedTarIsRefused(t *testing.T) {
	s, trust := newSigner(t, "")
	_, archive := bundled(t, build(s))
	end := len(archive) - 1024 // two blocks of zeros, which nothing needs
	for n := 0; n < end; n += 307 {
		_, err := imported(inFile(t, archive[:n]), trust)
		require.Error(t, err, "%d bytes", n)
	}
	_, err := imported(inFile(t, archive[:end-600]), trust)
	var format *FormatError
	require.ErrorAs(t, err, &format)
}

type entry struct {
	name string
	kind byte
	data string
}

func tarOf(t testing.TB, entries ...entry) string {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Typeflag: e.kind, Size: int64(len(e.data)), Mode: 0o644}
		if e.kind == tar.TypeSymlink || e.kind == tar.TypeLink {
			h.Size, h.Linkname = 0, "/etc/passwd"
		}
		require.NoError(t, w.WriteHeader(h))
		_, err := io.WriteString(w, e.data[:h.Size])
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	return inFile(t, out.Bytes())
}

func TestTricksOfTarsAreRefused(t *testing.T) {
	blob := "blobs/sha256/" + strings.Repeat("a", 64)
	for _, e := range []entry{
		{"../etc/passwd", tar.TypeReg, "x"},
		{"/etc/passwd", tar.TypeReg, "x"},
		{"blobs/sha256/../x", tar.TypeReg, "x"},
		{blob, tar.TypeSymlink, ""},
		{"index.json", tar.TypeLink, ""},
		{strings.ToUpper(blob), tar.TypeReg, "x"},
		{"other/", tar.TypeDir, ""},
		{"oci-layout", tar.TypeReg, layoutText},
		{"blobs", tar.TypeFifo, ""},
	} {
		_, err := Open(context.Background(),
			tarOf(t, entry{"oci-layout", tar.TypeReg, layoutText}, e))
		var format *FormatError
		require.ErrorAs(t, err, &format)
		require.Equal(t, fmt.Sprintf("entry %q", e.name), format.Field)
		require.Positive(t, format.Offset)
	}
}

func TestATarWithAMillionEntriesIsRefused(t *testing.T) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	require.NoError(t, w.WriteHeader(&tar.Header{Name: "blobs/", Typeflag: tar.TypeDir}))
	require.NoError(t, w.Flush())
	one := out.Bytes()[:512]
	name := filepath.Join(t.TempDir(), "many.tar")
	f, err := os.Create(name)
	require.NoError(t, err)
	many := bytes.Repeat(one, 1000)
	for range 1000 {
		_, err := f.Write(many)
		require.NoError(t, err)
	}
	require.NoError(t, f.Close())
	_, err = Open(context.Background(), name)
	require.ErrorContains(t, err, "more than 131072 entries")
}

// A signer renews what it signed itself, as long as that counts, and nothing else.
func TestACardIsSignedAgainByItsSigner(t *testing.T) {
	s, trust := newSigner(t, "")
	other, _ := newSigner(t, "")
	b := build(s)
	issued := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	b.Says.Issued, b.Says.NotAfter = issued, issued.Add(time.Hour)
	b.Says.MachineClass = "cpu:1"
	dir, _ := bundled(t, b)
	l, err := Open(context.Background(), dir)
	require.NoError(t, err)
	defer l.Close()
	card := l.Cards[0].Card
	_, err = other.Verify(card, issued)
	require.ErrorContains(t, err, "not trusted here")
	_, err = s.Verify(card, issued.Add(2*time.Hour))
	require.ErrorContains(t, err, "expired")
	says, err := s.Verify(card, issued)
	require.NoError(t, err)
	says.NotAfter = issued.Add(10 * time.Hour)
	again, err := ParseCard("card", s.Sign(card, *says))
	require.NoError(t, err)
	require.Equal(t, card.Build, again.Build)
	now, _, err := trust.Verify(again, issued.Add(9*time.Hour))
	require.NoError(t, err)
	require.Equal(t, says, now)
	require.Equal(t, "cpu:1", now.MachineClass)

	// A card has one signature.
	replaced, err := ParseCard("card", other.Sign(again, *says))
	require.NoError(t, err)
	require.Equal(t, []string{other.ID}, replaced.Signers())
}

// layoutWith writes an image layout whose one blob of a file has been replaced.
func layoutWith(t *testing.T, blob []byte, size int64) (string, *Trust) {
	s, trust := newSigner(t, "")
	b := build(s)
	b.Files = b.Files[:1]
	dir, _ := bundled(t, b)
	old, err := Open(context.Background(), dir)
	require.NoError(t, err)
	defer old.Close()
	c := *old.Cards[0].Config
	c.Files[0].Size = size
	layer := *old.Cards[0].Manifest.fileLayers()[0]
	layer.Digest, layer.Size = DigestOf(blob), int64(len(blob))
	raw := encode(newManifest(&c, []Descriptor{layer}))
	says := Predicate{BuildKey: c.BuildKey, Files: c.Files,
		Requests: []Request{RequestOf(c.Record)}}
	_, signed := s.signature(raw, says)
	w, err := Create(dir)
	require.NoError(t, err)
	card := newCard(raw, signed)
	for _, b := range [][]byte{card, blob} {
		require.NoError(t, w.write(blobsDir+"/"+DigestOf(b).Hex(), b))
	}
	parsed, err := ParseCard("card", card)
	require.NoError(t, err)
	w.name(parsed, card)
	require.NoError(t, w.Close())
	return dir, trust
}

func TestBlobContentsAreBounded(t *testing.T) {
	enc, err := zstd.NewWriter(nil)
	require.NoError(t, err)
	bomb := enc.EncodeAll(make([]byte, 64<<20), nil)
	dir, trust := layoutWith(t, bomb, 7)
	_, err = imported(dir, trust)
	require.ErrorContains(t, err, "8 bytes or more, not 7")

	dir, trust = layoutWith(t, []byte("not zstd"), 7)
	_, err = imported(dir, trust)
	require.ErrorContains(t, err, "a_ctx.onnx: ")

	wide, err := zstd.NewWriter(nil, zstd.WithWindowSize(128<<20))
	require.NoError(t, err)
	var out bytes.Buffer
	wide.Reset(&out)
	_, err = wide.Write(make([]byte, 200<<20))
	require.NoError(t, err)
	require.NoError(t, wide.Close())
	dir, trust = layoutWith(t, out.Bytes(), 200<<20)
	_, err = imported(dir, trust)
	require.ErrorContains(t, err, "window")

	dir, trust = layoutWith(t, enc.EncodeAll([]byte("a Graph"), nil), 7)
	_, err = imported(dir, trust)
	require.ErrorContains(t, err, "BLAKE3")
}

func TestTrustedKeysHaveAScope(t *testing.T) {
	day := issued.AddDate(0, 0, 1)
	for headers, want := range map[string]string{
		"":                               "",
		"EPs: OpenVINOExecutionProvider": "",
		"EPs: QNNExecutionProvider":      "not trusted for OpenVINOExecutionProvider",
		"Builders: ci, other":            "",
		"Builders: laptop":               `not trusted for builder "ci"`,
		"Not-After: 2026-11-23":          "trusted until 2026-11-23T23:59:59Z",
		"Not-After: 2026-11-24":          "",
		"Requests: " + RequestOf([]byte("other")).Key.String(): "",
		"Requests: " + RequestOf([]byte("third")).Key.String(): "not trusted for this request",
	} {
		s, trust := newSigner(t, headers)
		dir, _ := bundled(t, build(s))
		_, err := imported(dir, trust)
		if want == "" {
			require.NoError(t, err, headers)
		} else {
			require.ErrorContains(t, err, want)
			require.ErrorAs(t, err, new(*TrustError))
		}
	}
	// A statement may have requests for which its key is not trusted: they are not used.
	limited, only := newSigner(t, "Requests: "+RequestOf([]byte("other")).Key.String())
	part, _ := bundled(t, build(limited))
	in, err := Open(context.Background(), part)
	require.NoError(t, err)
	defer in.Close()
	says, _, err := only.Verify(in.Cards[0].Card, issued)
	require.NoError(t, err)
	require.Equal(t, []Request{RequestOf([]byte("other"))}, says.Requests)
	require.True(t, says.Answers(RequestOf([]byte("other")).Key))
	require.False(t, says.Answers(RequestOf([]byte("record")).Key))

	s, trust := newSigner(t, "")
	b := build(s)
	b.Says.NotAfter = issued
	dir, _ := bundled(t, b)
	got, err := Open(context.Background(), dir)
	require.NoError(t, err)
	defer got.Close()
	_, _, err = trust.Verify(got.Cards[0].Card, day)
	require.ErrorContains(t, err, "expired on 2026-11-24T12:00:00Z")
	trust.Revoked = func(string, Digest, Hash) string { return "it was leaked" }
	_, _, err = trust.Verify(got.Cards[0].Card, issued)
	require.ErrorContains(t, err, "revoked: it was leaked")

	_, other := newSigner(t, "")
	_, _, err = other.Verify(got.Cards[0].Card, issued)
	require.ErrorContains(t, err, "not trusted here")
	other.Keys[0].ID = s.ID // as if another key had this id
	_, _, err = other.Verify(got.Cards[0].Card, issued)
	require.ErrorContains(t, err, "signatures[0].sig")

	dir, _ = bundled(t, build(nil))
	_, err = imported(dir, trust)
	require.ErrorContains(t, err, "it is not signed")

	_, err = ParseKeys("x.pub",
		[]byte("-----BEGIN PUBLIC KEY-----\nMay: all\n\nAAAA\n-----END PUBLIC KEY-----\n"))
	require.ErrorContains(t, err, "x.pub: offset 0")
}

func TestNamesOfFilesAreCleanAndDistinct(t *testing.T) {
	for name, files := range map[string][]File{
		"comes twice": {{Name: "a"}, {Name: "a"}},
		"not a clean": {{Name: "../a"}},
		"control":     {{Name: "a\x00"}},
		"directories": {{Name: "a/b/c/d/e"}},
		"-1":          {{Name: "a", Size: -1}},
		"0, not 1":    {},
	} {
		c := build(nil).Config
		c.Version, c.Files, c.Graph = configVersion, files, "a"
		_, err := ParseConfig("config", encode(&c))
		require.ErrorContains(t, err, name)
	}
	_, err := ParseConfig("config", []byte(`{"version":1,"surprise":2}`))
	require.ErrorContains(t, err, "surprise")
	_, err = ParseConfig("config", []byte(strings.Repeat(`{"members":[`, 1<<14)))
	require.ErrorContains(t, err, "values")
}

func TestAWriterLeavesTheIndexAsItWasUntilItIsClosed(t *testing.T) {
	s, _ := newSigner(t, "")
	dir, _ := bundled(t, build(s))
	w, err := Create(dir)
	require.NoError(t, err)
	b := build(s)
	b.Files[1].Size++ // the file is shorter than was stated
	_, err = w.Add(context.Background(), b)
	require.ErrorContains(t, err, `file "sub/a.bin": its size is not`)
	left, err := filepath.Glob(filepath.Join(dir, "blobs/sha256/.new-*"))
	require.NoError(t, err)
	require.Empty(t, left)
	got, err := Open(context.Background(), dir)
	require.NoError(t, err)
	require.Len(t, got.Cards, 1)
	require.NoError(t, got.Close())
}

func FuzzCard(f *testing.F) {
	s, trust := sameSigner(f)
	dir, _ := bundled(f, build(s))
	b, err := Open(context.Background(), dir)
	require.NoError(f, err)
	f.Add(b.Cards[0].Raw)
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := ParseCard("card", raw)
		if err != nil {
			return
		}
		if _, _, err := trust.Verify(c, issued); err == nil {
			require.Equal(t, b.Cards[0].Raw, raw)
		}
	})
}

func FuzzConfig(f *testing.F) {
	c := build(nil).Config
	c.Version, c.Files = configVersion, []File{{Name: "a_ctx.onnx"}}
	f.Add(encode(&c))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if c, err := ParseConfig("config", raw); err == nil {
			require.Equal(t, raw, encode(c))
		}
	})
}

func FuzzTar(f *testing.F) {
	s, trust := sameSigner(f)
	_, archive := bundled(f, build(s))
	f.Add(archive)
	f.Fuzz(func(t *testing.T, raw []byte) {
		if got, err := imported(inFile(t, raw), trust); err == nil {
			require.Equal(t, contents, got)
		}
	})
}

func FuzzKeys(f *testing.F) {
	_, public, _, err := GenerateKey(false)
	require.NoError(f, err)
	f.Add(public)
	f.Fuzz(func(t *testing.T, raw []byte) { _, _ = ParseKeys("k.pub", raw) })
}

func TestReadFileNeverBlocks(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	for _, name := range []string{fifo, "/dev/zero", t.TempDir()} {
		ended := make(chan error, 1)
		go func() {
			_, err := ReadFile(name, 10)
			ended <- err
		}()
		select {
		case err := <-ended:
			require.ErrorContains(t, err, name+": it is not a regular file")
		case <-time.After(10 * time.Second):
			require.Fail(t, "it blocks", name)
		}
	}
	file := filepath.Join(t.TempDir(), "large")
	require.NoError(t, os.WriteFile(file, make([]byte, 11), 0o600))
	_, err := ReadFile(file, 10)
	require.ErrorContains(t, err, "more than 10 bytes")
	raw, err := ReadFile(file, 11)
	require.NoError(t, err)
	require.Len(t, raw, 11)
}
