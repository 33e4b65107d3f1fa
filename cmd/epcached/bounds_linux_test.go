package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/unixsock"
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
	graph := protowire.AppendString(protowire.AppendTag(nil, 2, protowire.BytesType), fmt.Sprint(seed))
	graph = append(graph, bytes.Repeat(one, parts)...)
	model := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 9)
	return protowire.AppendBytes(protowire.AppendTag(model, 7, protowire.BytesType), graph)
}

// Forty models at once of nothing but small parts, 0.8 MB each, do not take the daemon's memory, and
// another user is served meanwhile.
func TestMemoryOfReadingModelsIsBounded(t *testing.T) {
	s := newSite(t, runtimeFolder(t, openVINO))
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
	require.NoError(t, group.Wait())
	require.Less(t, d.peak(), 200, "MiB")
	_, err = tryGet(t, hostile, files[2], onMissFail)
	require.ErrorIs(t, err, unixsock.ErrBadModel)
	require.ErrorContains(t, err, "more than 16 MiB of memory")
}
