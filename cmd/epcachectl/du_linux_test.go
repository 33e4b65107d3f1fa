package main

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func TestDu(t *testing.T) {
	newStandIn(t).serve()
	out := call(t, "du").out
	for _, line := range []string{
		`(?m)^12.0 KiB +4.0 KiB +16.0 KiB +tiny.onnx aaaa$`, // what both share, once
		`(?m)^4.0 KiB +4.0 KiB +8.0 KiB +├─ a1 StandInExecutionProvider, batch=1$`,
		`(?m)^8.0 KiB +4.0 KiB +8.0 KiB +└─ a2 StandInExecutionProvider, batch=2, packed$`,
		// of the same name, and another model; on the second page
		`(?m)^0 B +4.0 KiB +8.0 KiB +tiny.onnx bbbb, build b1 StandInExecutionProvider, batch=1$`,
		`(?m)^uid:1 +4.0 KiB +8.0 KiB +24.0 KiB +3 builds +1.0 MiB$`,
		`(?m)^8.0 KiB on disk, .*, 3 builds$`,
		`(?m)^packing would free about 3.0 MiB of it; for details: epcachectl pack --all -n$`,
	} {
		require.Regexp(t, line, out)
	}
	out = call(t, "du", "a", "b").out
	require.Contains(t, out, "1.5 KiB of b_ctx.bin, 4.0 KiB, are also in a_ctx.bin\nalso 512 B "+
		"of small files, mostly graphs\nthe second has 2.0 KiB in common with the first\n")
	require.NotContains(t, out, "on disk", "the whole store is not asked for")
	require.NotContains(t, out, "packing")
	r := parseJSON(t, call(t, "du", "--json"))
	require.Len(t, jsonAt(t, r, "models"), 2)
	require.Len(t, jsonAt(t, r, "models", 0, "builds"), 2)
	require.EqualValues(t, 12288, jsonAt(t, r, "models", 0, "own_bytes"))
	require.Equal(t, "batch=2", jsonAt(t, r, "models", 0, "builds", 1, "shapes"))
	require.EqualValues(t, 3<<20, jsonAt(t, r, "packable_bytes"))
	require.NotContains(t, call(t, "du", "a", "b", "--json").out, "packable_bytes")
	require.Contains(t, call(t, "du", "a", "b", "c").err, "give two entries to compare them")
	require.Equal(t, "bbbb", jsonAt(t, r, "models", 1, "model_digest"))
	require.Equal(t, "whole", jsonAt(t, r, "models", 0, "builds", 0, "kept_as"))
	require.Equal(t, "packed", jsonAt(t, r, "models", 0, "builds", 1, "kept_as"))
	require.EqualValues(t, 1<<20, jsonAt(t, r, "users", 0, "quota_bytes"))
	require.Contains(t, call(t, "status").out, "3 blobs not yet compared with others")
}

// Nothing to free and nothing known yet are distinguished.
func TestDuReportsUncomparedBlobs(t *testing.T) {
	for want, line := range map[string]string{
		"packing would free no space": packableLine(0, 0),
		"how much packing would free is not known yet: 1 file not yet compared with " +
			"others": packableLine(0, 1),
		"packing would free about 1.0 MiB of it; for details: epcachectl pack --all " +
			"-n; 2 files not yet compared with others": packableLine(1<<20, 2),
	} {
		require.Equal(t, want, line)
	}
	newStandIn(t).serve()
	require.NotContains(t, call(t, "du", "a", "b").out, "packing")
}

func TestCheckSpaceReportsTheSum(t *testing.T) {
	newStandIn(t).serve()
	require.Regexp(t, `(?m)^all +12.0 KiB`, call(t, "check", "--space").out)
	require.Contains(t, call(t, "check", "--space", "--json").out, `"disk_bytes": 12288`)
}

// A model's file may be named, as for show: the daemon hears its digest.
func TestDuOfAModelsFile(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	model := tinyModel(t, "m.onnx")
	entry, err := modelfile.Entry(t.Context(), model)
	require.NoError(t, err)
	require.Equal(t, exit.Done, call(t, "du", model).code)
	require.Equal(t, []string{"usage " + entry}, b.changed())
	b.set(func() {
		b.err = &unixsock.Error{Class: wire.ErrorClass_NOT_FOUND,
			Text: "no entry " + strconv.Quote(entry)}
	})
	require.Contains(t, call(t, "du", model).err, "no entry "+strconv.Quote(model))
}
