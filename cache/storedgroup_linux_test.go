package cache

import (
	"context"
	"os"
	"path"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/views"
)

// leftGroup is a store that its daemon has left, with a group of three, and what its files are.
func leftGroup(t *testing.T) (b *bench, stored *request.Answer, had map[string]string) {
	b = newBench(t)
	stored = b.acquire(b.group(1, 2, 3))
	had = b.read(stored)
	require.NoError(t, stored.View.Close())
	b.close()
	return b, stored, had
}

func TestAStoredGroupIsFoundAsAGroup(t *testing.T) {
	b, stored, had := leftGroup(t)
	before := listFiles(t, b.state)
	a := b.find(b.group(1, 2, 3))
	require.Equal(t, request.Hit, a.Outcome)
	require.Equal(t, had, b.read(a))
	require.Equal(t, stored.RequestKey, a.RequestKey)
	require.Equal(t, stored.Record, a.Record)
	require.Equal(t, stored.SessionOptions, a.SessionOptions)
	require.Len(t, a.Members, 3)
	for i, m := range a.Members {
		require.Equal(t, stored.Members[i].SessionOptions, m.SessionOptions)
		require.Equal(t, stored.Members[i].ModelDigest, m.ModelDigest)
		require.Equal(t, path.Base(stored.Members[i].Graph), path.Base(m.Graph))
		require.FileExists(t, filepath.Join(a.Path, m.Graph))
	}
	require.Equal(t, before, listFiles(t, b.state))
	for _, other := range []*request.Request{b.group(2, 1, 3), b.group(1, 2)} {
		require.Contains(t, b.notFound(other, "").Hint, "omit --state")
	}
}

// As a daemon answers: the same build, place, options and key.
func TestAStoredMemberIsFoundAsADaemonFindsIt(t *testing.T) {
	b, _, had := leftGroup(t)
	b.reopen()
	var stored []*request.Answer
	for seed := range uint64(3) {
		a := b.acquire(b.request(b.model(seed + 1)))
		require.NoError(t, a.View.Close())
		stored = append(stored, a)
	}
	b.close()
	for i, want := range stored {
		r := b.request(b.model(uint64(i + 1)))
		r.Runtime.Directory = b.runtime
		a := b.find(r)
		require.Equal(t, request.Hit, a.Outcome)
		require.Equal(t, i, a.Member)
		require.Equal(t, want.Build.ID, a.Build.ID)
		require.Equal(t, want.RequestKey, a.RequestKey)
		require.Equal(t, want.Record, a.Record)
		require.Equal(t, want.ModelDigest, a.ModelDigest)
		require.Equal(t, want.SessionOptions, a.SessionOptions)
		require.Equal(t, want.ProviderOptions, a.ProviderOptions)
		require.Equal(t, want.GraphOptimizationLevel, a.GraphOptimizationLevel)
		require.Equal(t, path.Base(want.Graph), path.Base(a.Graph))
		require.Equal(t, compilers.Optimal, a.Compatibility.Verdict)
		require.Contains(t, a.Why, "part of a group")
		require.Equal(t, had, b.read(a))
	}
	for name, change := range map[string]func(*request.Request){
		"other options": func(r *request.Request) {
			r.EPs[0].Options = map[string]string{"level": "7"}
		},
		"embedded": func(r *request.Request) { r.Embed = true },
	} {
		r := b.request(b.model(2))
		change(r)
		require.NotEmpty(t, b.notFound(r, "").Text, name)
	}
}

func TestStoredSingleBuildIsPreferredToTheGroup(t *testing.T) {
	b := newBench(t)
	own := b.acquire(b.request(b.model(2)))
	require.NoError(t, own.View.Close())
	require.NoError(t, b.acquire(b.group(1, 2)).View.Close())
	b.close()
	a := b.find(b.request(b.model(2)))
	require.Equal(t, own.Build.ID, a.Build.ID)
	require.Empty(t, a.Members)
}

// Such a group has no key for a lone model, and its manifest says so.
func TestStoredMemberThatDoesNotLoadAloneIsNotServed(t *testing.T) {
	for name, change := range map[string]func(*index.Build){
		"they do not": func(b *index.Build) {
			for i := range b.Members {
				b.Members[i].AloneKey = index.RequestKey{}
			}
		},
		"it was not tried": func(b *index.Build) { b.LoadCheck = compilers.NotCheckable },
	} {
		t.Run(name, func(t *testing.T) {
			b, _, _ := leftGroup(t)
			s := b.stored()
			change(&s.Builds[0])
			_, err := s.Find(context.Background(), b.request(b.model(2)), "")
			require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
			a, err := s.Find(context.Background(), b.group(1, 2, 3), "")
			require.NoError(t, err)
			require.NoError(t, a.View.Close())
		})
	}
}

func TestStoredGroupWithAMissingFileIsNotServed(t *testing.T) {
	b, stored, _ := leftGroup(t)
	for _, f := range stored.Build.Files {
		name := f.Digest.String()
		blob := filepath.Join(b.state, "objects", name[:2], name)
		found, err := filepath.Glob(filepath.Join(b.state, "views", "*", "*", "*"))
		require.NoError(t, err)
		for _, inner := range found {
			require.NoError(t, views.MakeTreeRemovable(filepath.Dir(inner)))
			_ = os.Remove(filepath.Join(inner, f.Name))
		}
		away := blob + ".away"
		require.NoError(t, os.Rename(blob, away))
		for _, r := range []*request.Request{b.group(1, 2, 3), b.request(b.model(1)),
			b.request(b.model(3))} {
			e := b.notFound(r, "")
			require.Regexp(t,
				"a group of 3 models that must be requested together: .* is not in", e.Text)
		}
		require.NoError(t, os.Rename(away, blob))
	}
	s := b.stored()
	a, err := s.Find(context.Background(), b.group(1, 2, 3), "")
	require.NoError(t, err)
	require.Nil(t, a.View, "the views were taken apart")
	require.NoError(t,
		s.Unpack(context.Background(), a, filepath.Join(t.TempDir(), "unpacked"), nil))
	defer a.View.Close()
	for _, m := range a.Members {
		require.FileExists(t, filepath.Join(a.Path, m.Graph))
	}
}

func TestAStoredGroupsExternalDataIsAskedForByModel(t *testing.T) {
	b := newBench(t)
	first, second := b.external(1, nil), b.external(2, nil)
	r := first
	r.Group = []identity.Files{{Name: "second", Graph: second.Graph}}
	r.External = nil
	_, err := b.stateless(r)
	var need *identity.NeedFilesError
	require.ErrorAs(t, err, &need)
	require.Equal(t, []string{"weights.bin", "weights.bin"}, need.Locations)
	require.Equal(t, []int{0, 1}, need.Members)
}

// stateless asks the store of a bench after its daemon has ended.
func (b *bench) stateless(r *request.Request) (*request.Answer, error) {
	b.Helper()
	b.close()
	return b.stored().Find(context.Background(), r, "")
}
