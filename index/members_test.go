package index

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// group makes the sample a group of two models that share sub/a.bin.
func group(b *Build) {
	b.Files = append(b.Files, File{"a_2_ctx.onnx", 900, cas.Digest{3}})
	b.Members = []Member{
		{ModelName: b.ModelName, ModelDigest: b.ModelDigest, Graph: b.Graph,
			SessionOptions: map[string]string{"share": "1"}, AloneKey: RequestKey{31}},
		{ModelName: "decoder.onnx", ModelDigest: cas.Digest{8}, Graph: "a_2_ctx.onnx",
			SessionOptions: map[string]string{"share": "1"}, AloneKey: RequestKey{32},
			Source: Source{Kind: SourceCopy, Files: []File{{"", 70, cas.Digest{21}}}}},
	}
}

func TestAGroupIsFoundByEachOfItsMembers(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	_, err := x.Lookup(RequestKey{32}, "shared")
	require.NoError(t, err)
	b := publish(t, x, group)
	keys := []RequestKey{b.RequestKey, {31}, {32}}
	found := func(x *Index, want ...Build) {
		for _, k := range keys {
			builds, err := x.Lookup(k, "shared")
			require.NoError(t, err)
			require.Equal(t, want, append([]Build(nil), builds...), k)
			builds, err = x.Lookup(k, "uid:7")
			require.NoError(t, err)
			require.Empty(t, builds)
		}
	}
	found(x, b)
	space, err := x.Space()
	require.NoError(t, err)
	require.Equal(t,
		Space{LogicalBytes: 6970, UniqueBytes: 6970, Entries: 1, Builds: 1, DiskBytes: 20480,
			ManifestBytes: 4096}, space, "one entry, and the copied source counts")
	ids, err := x.Needs(cas.Digest{21})
	require.NoError(t, err)
	require.Equal(t, []BuildID{b.ID}, ids)
	closeSound(t, x)

	require.NoError(t, changeSchema(schemaVersion+1)(dir+"/index.db"))
	x = open(t, dir)
	require.NotEmpty(t, x.Rebuilt(), "else this would prove nothing of manifests")
	found(x, b)
	closeSound(t, x)
	x = open(t, dir)
	found(x, b)
	other := publish(t, x, group, func(b *Build) { // another group with the same second model
		b.RequestKey, b.ModelDigest = RequestKey{4}, cas.Digest{9}
		b.Members[0].ModelDigest, b.Members[0].AloneKey = b.ModelDigest, RequestKey{33}
		b.Created = b.Created.Add(time.Second)
	})
	builds, err := x.Lookup(RequestKey{32}, "shared")
	require.NoError(t, err)
	require.Equal(t, []Build{other, b}, builds, "what was looked up before is not all")
	for _, id := range []BuildID{other.ID, b.ID} {
		require.NoError(t, x.Retract(context.Background(), id, "by hand"))
	}
	found(x)
	require.Empty(t, x.Rebuilt(), "no row is left that would say that the database is damaged")
	closeSound(t, x)
	x = open(t, dir)
	found(x)
	closeSound(t, x)
}

func TestPublishRefusesInvalidGroups(t *testing.T) {
	for name, change := range map[string]func(*Build){
		"one member":              func(b *Build) { b.Members = b.Members[:1] },
		"another first model":     func(b *Build) { b.Members[0].ModelDigest[0]++ },
		"another first graph":     func(b *Build) { b.Members[0].Graph = "a_2_ctx.onnx" },
		"a graph that is no file": func(b *Build) { b.Members[1].Graph = "b_ctx.onnx" },
		"one graph for two":       func(b *Build) { b.Members[1].Graph = b.Graph },
		"one model twice": func(
			b *Build) {
			b.Members[1].ModelDigest = b.ModelDigest
		},
		"a second source of the first": func(
			b *Build) {
			b.Members[0].Source = b.Members[1].Source
		},
		"a source that is none": func(
			b *Build) {
			b.Members[1].Source.Files[0].Name = "weights"
		},
		"more members than anybody sends": func(b *Build) {
			b.Members = append(b.Members,
				make([]Member, maxMembers)...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := open(t, memoryDir(t))
			b := sampleBuild()
			group(&b)
			change(&b)
			require.Error(t, x.Publish(context.Background(), b))
			builds, err := x.Lookup(b.RequestKey, "shared")
			require.NoError(t, err)
			require.Empty(t, builds)
		})
	}
}

func TestAMemberIsFoundByItsModel(t *testing.T) {
	b := sampleBuild()
	group(&b)
	require.Equal(t, 1, b.MemberOf(cas.Digest{8}))
	require.Equal(t, -1, b.MemberOf(cas.Digest{9}))
}
