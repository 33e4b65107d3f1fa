package identity

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/filestamp"
	"github.com/epcached/epcached/internal/memo"
)

func TestARangeThatModelsShareIsHashedOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "weights.bin")
	require.NoError(t, os.WriteFile(file, make([]byte, 1000), 0o644))
	f, err := os.Open(file)
	require.NoError(t, err)
	defer f.Close()
	s := &Sums{}
	for range 2 {
		src, err := s.source(f)
		require.NoError(t, err)
		d, err := s.sumRange(context.Background(), src, 10, 500)
		require.NoError(t, err)
		want, err := Sum(context.Background(), src, 10, 500)
		require.NoError(t, err)
		require.Equal(t, want, d)
	}
	require.Len(t, s.known, 1)
	for key := range s.known {
		s.known[key] = [32]byte{1}
	}
	src, err := s.source(f)
	require.NoError(t, err)
	d, err := s.sumRange(context.Background(), src, 10, 500)
	require.NoError(t, err)
	require.Equal(t, [32]byte{1}, d, "it is from memory")
	d, err = s.sumRange(context.Background(), src, 10, 501)
	require.NoError(t, err)
	require.NotEqual(t, [32]byte{1}, d, "another range is not")
}

// remembers is a memo.Book in memory.
type remembers map[string][]byte

func (r remembers) Get(key []byte) ([]byte, bool) { v, ok := r[string(key)]; return v, ok }
func (r remembers) Save(key, value []byte) error  { r[string(key)] = value; return nil }

// An earlier daemon remembered such models as compiled: they are read again, once.
func TestIdentitiesOfEarlierReadersAreNotBelieved(t *testing.T) {
	book, key := remembers{}, memo.ID{1}
	id := Model{Digest: cas.Digest{2}, Compiled: true}
	require.NoError(t, memo.Save(book, "graph:"+string(key[:]), id))
	_, ok := NewModels(book, time.Now).load(key, "graph")
	require.False(t, ok)
	id.Reader = readerVersion
	NewModels(book, time.Now).save(key, "graph", id)
	got, ok := NewModels(book, time.Now).load(key, "graph")
	require.True(t, ok)
	require.Equal(t, id, got)
}

// Remembered facts about a model serve all requests for it, concurrent ones too.
func TestGroupLeavesRememberedFailuresOfMembers(t *testing.T) {
	ms := NewModels(remembers{}, time.Now)
	names, models := [2]string{"batch", "untouched"}, []Files{graphFile(t, 1), graphFile(t, 2)}
	for i, f := range models {
		key, ok := memo.FileKey(1, f.Graph)
		if !ok {
			t.Skip("SKIPPED: the temporary directory's file system promises nothing of stamps")
		}
		ms.known.Set(memoEntry{key, "graph"},
			Model{Digest: cas.Digest{byte(i + 1)}, FreeDims: names[:1]}, 1)
	}
	m, err := ms.Identify(t.Context(), &IdentifyRequest{UID: 1, Models: models})
	require.NoError(t, err)
	require.Equal(t, []string{"batch", "batch"}, m.FreeDims)
	require.Equal(t, "untouched", names[1])
}

// graphFile is a model in a file that is not written any more.
func graphFile(t *testing.T, seed uint64) Files {
	path := filepath.Join(t.TempDir(), "m.onnx")
	require.NoError(t, os.WriteFile(path, compilertest.Dense(seed, 8, 1), 0o644))
	f, err := os.Open(path)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	require.NoError(t, filestamp.WriteBack(f))
	return Files{Name: "m.onnx", Graph: f}
}

func TestAModelIsReadOnceForAll(t *testing.T) {
	ms := NewModels(remembers{}, func() time.Time { return time.Now().Add(time.Hour) })
	f := graphFile(t, 1)
	key, ok := memo.FileKey(1, f.Graph)
	if !ok {
		t.Skip("SKIPPED: the temporary directory's file system promises nothing of stamps")
	}
	identify := func(ctx context.Context) (Model, error) {
		return ms.Identify(ctx, &IdentifyRequest{UID: 1, Models: []Files{f},
			Phase: func(string) {}})
	}
	end, err := ms.reading.Lock(t.Context(), key)
	require.NoError(t, err)
	var wait sync.WaitGroup
	var models [8]Model
	for i := range models {
		wait.Go(func() { models[i], _ = identify(t.Context()) })
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = identify(ctx)
	require.Equal(t, apierr.Cancelled, apierr.ClassOf(err), "a caller that leaves does not wait")
	read := Model{Digest: cas.Digest{1}} // not what they would read themselves
	ms.known.Set(memoEntry{key, "graph"}, read, 1)
	end()
	wait.Wait()
	for _, m := range models {
		require.Equal(t, read, m)
	}
}

// A file system that another user serves may never answer. It blocks a bounded number of
// goroutines.
func TestOpensOfOtherUsersFilesAreBounded(t *testing.T) {
	s := NewSources(1)
	stuck := make(chan struct{})
	defer close(stuck)
	never := func() (*os.File, error) { <-stuck; return nil, errors.New("late") }
	for range maxBlocking {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := s.open(ctx, never)
		require.ErrorIs(t, err, ErrUnanswered)
	}
	_, err := s.open(t.Context(), never)
	require.ErrorContains(t, err, "8 opens of other files have not returned")
}
