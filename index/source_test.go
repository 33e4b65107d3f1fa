package index

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index/manifestpb"
)

func TestSourceIsKept(t *testing.T) {
	copies := []File{{"", 100, cas.Digest{5}}, {"data/w.bin", 300, cas.Digest{2}}}
	for name, s := range map[string]Source{
		"none":      {},
		"reference": {Kind: SourceReference, Path: "/home/anna/m.onnx"},
		"with external data": {Kind: SourceReference, Path: "/m.onnx",
			External: map[string]string{"b.bin": "/b.bin", "a.bin": "/other/a.bin"}},
		"path that is not UTF-8": {Kind: SourceReference, Path: "/home/\xff.onnx"},
		"copy":                   {Kind: SourceCopy, Files: copies},
	} {
		t.Run(name, func(t *testing.T) {
			dir := memoryDir(t)
			x := open(t, dir)
			b := publish(t, x, func(b *Build) { b.Source = s })
			closeSound(t, x)
			x = open(t, dir)
			got, err := x.Get(b.ID)
			require.NoError(t, err)
			require.Equal(t, b, got)
			closeSound(t, x)
		})
	}
}

func TestCopiesOfASourceCount(t *testing.T) {
	x := open(t, memoryDir(t))
	b := publish(t, x, func(b *Build) {
		b.Source = Source{Kind: SourceCopy,
			Files: []File{{"", 100, cas.Digest{5}}, {"w.bin", 5000, cas.Digest{2}}}}
	})
	ids, err := x.Needs(cas.Digest{5})
	require.NoError(t, err)
	require.Equal(t, []BuildID{b.ID}, ids)
	space, err := x.Space()
	require.NoError(t, err)
	require.Equal(t,
		Space{LogicalBytes: 11100, UniqueBytes: 6100, Entries: 1, Builds: 1, DiskBytes: 16384,
			ManifestBytes: 4096}, space)
	require.NoError(t, x.Retract(ctx, b.ID, "test"))
	ids, err = x.Needs(cas.Digest{5})
	require.NoError(t, err)
	require.Empty(t, ids)
	space, err = x.Space()
	require.NoError(t, err)
	require.Zero(t, space)
	closeSound(t, x)
}

func TestBadSources(t *testing.T) {
	one := []File{{"", 1, cas.Digest{5}}}
	for name, s := range map[string]Source{
		"unheard of":             {Kind: "telepathy"},
		"no path":                {Kind: SourceReference},
		"relative path":          {Kind: SourceReference, Path: "m.onnx"},
		"path that is not clean": {Kind: SourceReference, Path: "/a/../m.onnx"},
		"path with a zero":       {Kind: SourceReference, Path: "/m\x00.onnx"},
		"external data of no name": {Kind: SourceReference, Path: "/m.onnx",
			External: map[string]string{"": "/w.bin"}},
		"external data, relative": {Kind: SourceReference, Path: "/m.onnx",
			External: map[string]string{"w.bin": "w.bin"}},
		"location not UTF-8": {Kind: SourceReference, Path: "/m.onnx",
			External: map[string]string{"\xff": "/w.bin"}},
		"reference with copies": {Kind: SourceReference, Path: "/m.onnx", Files: one},
		"no copies":             {Kind: SourceCopy},
		"copy with a path":      {Kind: SourceCopy, Path: "/m.onnx", Files: one},
		"no graph":              {Kind: SourceCopy, Files: []File{{"w.bin", 1, cas.Digest{5}}}},
		"two graphs":            {Kind: SourceCopy, Files: append(one, one...)},
		"negative size":         {Kind: SourceCopy, Files: []File{{"", -1, cas.Digest{5}}}},
	} {
		t.Run(name, func(t *testing.T) {
			b := sampleBuild()
			b.Source = s
			_, err := encodeManifest(b)
			require.ErrorContains(t, err, "source")
		})
	}
}

func TestASourceOfANewerKindIsNone(t *testing.T) {
	b := sampleBuild()
	body, err := marshalBuild(b)
	require.NoError(t, err)
	var m manifestpb.Manifest
	require.NoError(t, proto.Unmarshal(body, &m))
	m.Source = &manifestpb.Source{Kind: "telepathy",
		Files: []*manifestpb.SourceFile{{Location: "x"}}}
	body, err = proto.Marshal(&m)
	require.NoError(t, err)
	got, err := unmarshalBuild(body)
	require.NoError(t, err)
	require.Equal(t, b, got)
}
