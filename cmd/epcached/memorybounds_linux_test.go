package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/index/manifestpb"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// peak is the most memory that the daemon has used since it started, in MiB.
func (d *epcached) peak() int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.pid()))
	require.NoError(d, err)
	_, rest, found := strings.Cut(string(text), "VmHWM:")
	require.True(d, found)
	kb, err := strconv.Atoi(strings.Fields(rest)[0])
	require.NoError(d, err)
	return kb >> 10
}

// crowd is a model of nothing but that many equal parts of its graph.
func crowd(seed, parts int, field protowire.Number, part []byte) []byte {
	one := protowire.AppendBytes(protowire.AppendTag(nil, field, protowire.BytesType), part)
	graph := protowire.AppendString(protowire.AppendTag(nil, 2, protowire.BytesType),
		fmt.Sprint(seed))
	graph = append(graph, bytes.Repeat(one, parts)...)
	model := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 9)
	return protowire.AppendBytes(protowire.AppendTag(model, 7, protowire.BytesType), graph)
}

// Forty models at once of nothing but small parts, 0.8 MB each, do not take the daemon's memory,
// and another user is served meanwhile.
func TestMemoryOfReadingModelsIsBounded(t *testing.T) {
	t.Parallel()
	s := newSite(t, runtimeDir(t, openVINO))
	d := s.start(t)
	dir := t.TempDir()
	good := writeModel(t, dir, 1)
	get(t, d.dial(), good)
	hostile, other := dialAs(t, d.socket, 65534), dialAs(t, d.socket, 65533)
	external := protowire.AppendTag(nil, 13, protowire.BytesType) // of TensorProto
	external = protowire.AppendBytes(external, []byte("\x0a\x08location\x12\x01w"))
	external = append(external, 14<<3, 1)
	var files []string
	for i := range 40 {
		text := crowd(i, 400_000, 5, nil) // initializers
		switch i % 4 {
		case 1:
			text = crowd(i, 800_000/(len(external)+2), 5, external)
		case 2:
			text = crowd(i, 400_000, 11, nil) // inputs
		case 3:
			text = crowd(i, 200_000, 1, []byte("\x22\x00")) // nodes
		}
		files = append(files, filepath.Join(dir, fmt.Sprintf("hostile%d.onnx", i)))
		require.NoError(t, os.WriteFile(files[i], text, 0o644))
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var group errgroup.Group
	answered := make(chan struct{}, len(files))
	for _, path := range files {
		group.Go(func() error {
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			request := forModel(path)
			onMissFail(request)
			_, view, err := hostile.Acquire(ctx, request, []*os.File{f}, nil, nil)
			if view != nil || err == nil {
				return fmt.Errorf("%s: it was answered", path)
			}
			answered <- struct{}{}
			return nil
		})
	}
	for range 20 {
		require.Equal(t, "hit", get(t, other, good, onMissFail).Outcome)
	}
	fresh := filepath.Join(dir, "fresh.onnx") // has to be read
	text, err := os.ReadFile(good)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(fresh, text, 0o644))
	require.Equal(t, "hit", get(t, other, fresh, onMissFail).Outcome)
	for range 8 { // the others wait for their turns
		<-answered
	}
	cancel()
	require.NoError(t, group.Wait())
	require.Less(t, d.peak(), 200, "MiB")
	_, err = tryGet(t, hostile, files[2], onMissFail)
	require.ErrorIs(t, err, unixsock.ErrBadModel)
	require.ErrorContains(t, err, "more than 16 MiB of memory")
}

// multiply adds builds like the one that a store has, with keys and files of their own. The
// manifests are as doc/format.md has them; the next daemon makes the index of these.
func multiply(t testing.TB, state string, builds int) {
	manifests, err := filepath.Glob(filepath.Join(state, "manifests", "*", "*"))
	require.NoError(t, err)
	require.Len(t, manifests, 1)
	file, err := os.ReadFile(manifests[0])
	require.NoError(t, err)
	var one manifestpb.Manifest
	require.NoError(t, proto.Unmarshal(file[16:len(file)-32], &one))
	write := func(dir string, name, content []byte) {
		shard := filepath.Join(state, dir, fmt.Sprintf("%x", name[:1]))
		require.NoError(t, os.MkdirAll(shard, 0o700))
		require.NoError(t,
			os.WriteFile(filepath.Join(shard, fmt.Sprintf("%x", name)), content, 0o444))
	}
	for i := range builds {
		for _, f := range one.Files {
			content := fmt.Appendf(nil, "%s of %d", f.Name, i)
			digest := blake3.Sum256(content)
			f.Size, f.Digest = int64(len(content)), digest[:]
			write("objects", f.Digest, content)
		}
		random := rand.NewChaCha8([32]byte{byte(i), byte(i >> 8)})
		for _, key := range [][]byte{one.Id, one.RequestKey, one.BuildKey, one.ModelDigest} {
			_, _ = random.Read(key) // never fails
		}
		body, err := proto.MarshalOptions{Deterministic: true}.Marshal(&one)
		require.NoError(t, err)
		whole := append([]byte("epcmanif"), 1, 0, 0, 0)
		whole = append(binary.LittleEndian.AppendUint32(whole, uint32(len(body))), body...)
		sum := blake3.Sum256(whole)
		write("manifests", one.Id, append(whole, sum[:]...))
	}
	require.NoError(t, os.Remove(filepath.Join(state, "index.db")))
}

// A user's requests of all kinds on many connections take bounded memory; another user's requests
// are answered meanwhile, and the database stays.
func TestMemoryOfQuestionsAboutTheStoreIsBounded(t *testing.T) {
	t.Parallel()
	s := newSite(t, runtimeDir(t, openVINO))
	good := writeModel(t, t.TempDir(), 1)
	d := s.start(t)
	get(t, d.dial(), good)
	d.stop()
	multiply(t, s.state, 1000)
	d = s.start(t)
	require.Len(t, d.list(), 1001)
	inode := func() uint64 {
		info, err := os.Stat(filepath.Join(s.state, "index.db"))
		require.NoError(t, err)
		return info.Sys().(*syscall.Stat_t).Ino
	}
	database, other := inode(), dialAs(t, d.socket, 65533)
	questions := []func() proto.Message{
		func() proto.Message { return &wire.List{} },
		func() proto.Message { return &wire.Usage{} },
		func() proto.Message { return &wire.Events{} },
		func() proto.Message { return &wire.Remove{All: true, DryRun: true} },
		func() proto.Message { return &wire.Collect{DryRun: true} },
	}
	var group errgroup.Group
	answered := make(chan struct{}, 32*30)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for i := range 32 {
		c := dialAs(t, d.socket, 65534)
		for j := range 30 {
			group.Go(func() error {
				// The request may be refused or not; here it counts that it is answered.
				_, err := unixsock.Ask[wire.ListReply](ctx, c, questions[(i+j)%len(questions)](),
					nil)
				if errors.Is(err, unixsock.ErrConnectionLost) ||
					errors.Is(err, unixsock.ErrInternal) {
					return err
				}
				answered <- struct{}{}
				return nil
			})
		}
	}
	for range 100 {
		require.Equal(t, "hit", get(t, other, good, onMissFail).Outcome)
	}
	reply, err := unixsock.Ask[wire.ListReply](limited(t), other, &wire.List{}, nil)
	require.NoError(t, err)
	require.NotEmpty(t, reply.Builds)
	for range 40 {
		<-answered
	}
	cancel()
	require.NoError(t, group.Wait())
	require.NotContains(t, d.log.String(), "level=ERROR", "a cancelled request is no error")
	require.Less(t, d.peak(), 200, "MiB")
	require.Equal(t, database, inode(), "the database is the same")
}

// Long names of models are refused with their bound, and cut where many builds are listed.
func TestNamesOfModelsAreBounded(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	c, model := d.dial(), writeModel(t, t.TempDir(), 1)
	named := func(bytes int) func(*wire.Acquire) {
		return func(r *wire.Acquire) { r.Model.Name = strings.Repeat("n", bytes) }
	}
	_, err := tryGet(t, c, model, named(4097))
	require.ErrorIs(t, err, unixsock.ErrBadRequest)
	require.ErrorContains(t, err, "its name has 4097 bytes, more than 4096")
	require.Less(t, len(err.Error()), 1024)
	build := get(t, c, model, named(4096)).Build
	require.Len(t, d.list()[0].ModelName, 400)
	show, err := unixsock.Ask[wire.ShowReply](limited(t), c, &wire.Show{Entry: build}, nil)
	require.NoError(t, err)
	require.Len(t, show.Builds[0].ModelName, 4096)
}

// A file that is no recipe stops no start, and stays.
func TestAStrayFileAmongTheRecipesIsLeftAlone(t *testing.T) {
	s := newSite(t, runtimeDir(t, openVINO))
	d := s.start(t)
	d.stop()
	stray := filepath.Join(s.state, "recipes", "notes.txt")
	require.NoError(t, os.WriteFile(stray, []byte("mine"), 0o644))
	d = s.start(t)
	reply, err := unixsock.Ask[wire.CheckReply](limited(t), d.dial(), &wire.Check{}, nil)
	require.NoError(t, err)
	require.Len(t, reply.Findings, 1)
	require.Equal(t, "foreign", reply.Findings[0].Kind)
	require.Equal(t, "recipes/notes.txt", reply.Findings[0].Object)
	require.FileExists(t, stray)
	d.stop()
}

// A user learns of own builds and of the store's bounds, and administrators of all.
func TestCountsOfAllUsersAreForAdministrators(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	dir := t.TempDir()
	own := writeModel(t, dir, 2)
	root, user := d.dial(), dialAs(t, d.socket, 65533)
	get(t, root, writeModel(t, dir, 1))
	get(t, user, own)
	get(t, user, own)
	status := func(c *unixsock.Client) *wire.StatusReply {
		s, err := unixsock.Ask[wire.StatusReply](limited(t), c, &wire.Status{}, nil)
		require.NoError(t, err)
		usage, err := unixsock.Ask[wire.UsageReply](limited(t), c, &wire.Usage{}, nil)
		require.NoError(t, err)
		require.Equal(t, s.Space.Builds, usage.Space.Builds)
		require.Equal(t, s.Space.LogicalBytes, usage.Space.LogicalBytes)
		return s
	}
	all, mine := status(root), status(user)
	require.EqualValues(t, []uint64{1, 2, 2}, []uint64{all.Hits, all.Compiles, all.Space.Builds})
	require.Zero(t, mine.Hits+mine.Misses+mine.Compiles+mine.Failures)
	require.Zero(t, mine.Connections)
	require.EqualValues(t, []uint64{2, 1}, []uint64{all.Sourceless.Looked, mine.Sourceless.Looked})
	require.EqualValues(t, 1, mine.Space.Builds)
	require.Less(t, mine.Space.LogicalBytes, all.Space.LogicalBytes)
	require.Zero(t, mine.Space.DiskBytes+mine.Space.UniqueBytes+mine.Space.ManifestBytes)
	require.Equal(t, all.Space.BudgetBytes, mine.Space.BudgetBytes)
	require.Len(t, mine.Runtimes, 1)
}

// A claim keeps the names of inputs and outputs in memory, so a model of very many gets none.
func TestMemoryOfClaimsIsBounded(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	path := filepath.Join(t.TempDir(), "inputs.onnx")
	require.NoError(t, os.WriteFile(path, crowd(1, 40_000, 11, nil), 0o644))
	_, err := tryGet(t, d.dial(), path, func(r *wire.Acquire) { r.OnMiss = wire.OnMiss_CLAIM })
	require.ErrorIs(t, err, unixsock.ErrBadModel)
	require.ErrorContains(t, err, "inputs, outputs and metadata are too large")
}
