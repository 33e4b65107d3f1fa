package index

import (
	"context"
	"crypto/rand"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// open opens the index in dir and, when the test ends, checks and closes it.
func open(t *testing.T, dir string) *Index {
	t.Helper()
	x, err := Open(dir, Options{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = x.Close() }) // for tests that fail; a second Close does nothing
	return x
}

// closeSound closes an index after a full check.
func closeSound(t *testing.T, x *Index) {
	t.Helper()
	found, err := x.Check(context.Background(), nil)
	require.NoError(t, err)
	require.Empty(t, found)
	require.NoError(t, x.Close())
}

func sampleBuild() Build {
	b := Build{
		Scope: "shared", UID: 1000, ModelName: "mobilenet.onnx", Record: []byte{1, 2, 3},
		RecordJSON: `{"a":1}`,
		EPs: []EPFacts{{
			Name: "QNNExecutionProvider", Version: "2.7.0",
			Library:       "libonnxruntime_providers_qnn.so",
			LibraryDigest: cas.Digest{9}, SDKVersion: "2.51.0", HardwareArchitecture: "v73",
			CompatibilityString: "v2:6:2.51.0", DriverVersion: "1", Devices: []string{"NPU"},
		}},
		ORTVersion: "1.31.1", Route: "compile_api", Graph: "a_ctx.onnx",
		Files: []File{{"a_ctx.onnx", 1000, cas.Digest{1}},
			{"sub/a.bin", 5000, cas.Digest{2}}},
		ProviderOptions: map[string]map[string]string{"QNNExecutionProvider": {"soc_model": "60"}},
		SessionOptions:  map[string]string{"k": "v"}, GraphOptimizationLevel: "all",
		CompileSeconds: 1.5, Created: time.Unix(1_790_000_000, 123).UTC(), LoadCheck: "passed",
		IRVersion: 13,
		Warnings:  []string{"slow"}, ModelDigest: cas.Digest{7}, RequestKey: RequestKey{3},
		BuildKey: BuildKey{4},
	}
	_, _ = rand.Read(b.ID[:]) // never fails
	return b
}

func publish(t *testing.T, x *Index, change ...func(*Build)) Build {
	t.Helper()
	b := sampleBuild()
	for _, fn := range change {
		fn(&b)
	}
	require.NoError(t, x.Publish(context.Background(), b))
	return b
}

func TestPublishedIsFoundAfterARestart(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	require.Empty(t, x.Rebuilt(), "a new store has lost nothing")
	b := publish(t, x, func(b *Build) { b.Put = true })
	for range 2 {
		builds, err := x.Lookup(b.RequestKey, "shared")
		require.NoError(t, err)
		require.Equal(t, []Build{b}, builds)
		got, err := x.Get(b.ID)
		require.NoError(t, err)
		require.Equal(t, b, got)
		ids, err := x.Needs(cas.Digest{2})
		require.NoError(t, err)
		require.Equal(t, []BuildID{b.ID}, ids)
		space, err := x.Space()
		require.NoError(t, err)
		require.Equal(t,
			Space{LogicalBytes: 6000, UniqueBytes: 6000, Entries: 1, Builds: 1, DiskBytes: 12288,
				ManifestBytes: 4096}, space)
		closeSound(t, x)
		x = open(t, dir)
		require.Empty(t, x.Rebuilt())
	}
}

// what is written is what every event reports, and Retract reports itself.
func TestEventsReachSubscribersAndTheJournal(t *testing.T) {
	dir := memoryDir(t)
	var heard []Event
	x, err := Open(dir, Options{OnEvent: func(e Event) { heard = append(heard, e) }})
	require.NoError(t, err)
	b := publish(t, x)
	want := []Event{
		{Kind: "changed", Runtime: "/opt/ort", Text: "another library"},
		{Kind: "judged", RequestKey: b.RequestKey, BuildID: b.ID, BuildKey: b.BuildKey,
			ModelName: b.ModelName, Scope: "uid:7", By: "uid:8", Runtime: "/opt/ort"},
		{Kind: "retracted", RequestKey: b.RequestKey, BuildID: b.ID, BuildKey: b.BuildKey,
			ModelName: b.ModelName, Scope: b.Scope, By: fmt.Sprintf("uid:%d", b.UID),
			Text: "by hand"},
	}
	early := time.Now().Add(-time.Hour)
	for i, e := range want[:2] {
		e.At = early.Add(time.Duration(i) * time.Minute)
		require.NoError(t, x.Journal.AddEvent(context.Background(), e))
	}
	require.NoError(t, x.Retract(context.Background(), b.ID, "by hand"))
	without := func(events []Event) (out []Event) {
		for i, e := range events {
			require.NotZero(t, e.At)
			require.EqualValues(t, i+1, e.Sequence)
			e.At, e.Sequence = time.Time{}, 0
			out = append(out, e)
		}
		return out
	}
	require.Equal(t, want, without(heard))
	require.Equal(t, want, without(x.Journal.Events(time.Time{})))
	require.Len(t, x.Journal.Events(early.Add(time.Second)), 2)
	require.NoError(t, x.Close())

	again := open(t, dir)
	kept := again.Journal.Events(time.Time{})
	for i := range heard {
		heard[i].Sequence = 0
	}
	require.Equal(t, heard, kept, "but for the sequence, which counts from the start")
	require.NoError(t, again.Close())
}

func TestWhereABuildComesFromIsKept(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	compiled := publish(t, x)
	require.Equal(t, compiled.Created, compiled.Compiled())
	made := Origin{ID: compiled.ID, BuildKey: compiled.BuildKey, Created: compiled.Created}
	b := publish(t, x, func(b *Build) {
		b.RequestKey, b.Created, b.Converted, b.VerifiedOutput = RequestKey{8},
			b.Created.Add(time.Hour), made, 0.01
	})
	require.NoError(t, x.Close())
	x = open(t, dir)
	got, err := x.Get(b.ID)
	require.NoError(t, err)
	require.Equal(t, b, got)
	require.Equal(t, compiled.Created, got.Compiled(), "a conversion makes nothing younger")
}

// These do one change.

func (x *Index) Publish(ctx context.Context, b Build) error {
	c, err := x.Stage(ctx, b)
	if err != nil {
		return err
	}
	x.Commit([]*Change{c})
	return c.Err
}

func (x *Index) Retract(_ context.Context, id BuildID, why string) error {
	c := &Change{ID: id, Why: why}
	x.Commit([]*Change{c})
	x.NoteRetracted([]*Change{c})
	return c.Err
}

func (j *Journal) mark(m Mark) error {
	j.Mark([]*Mark{&m})
	return m.Err
}

func (j *Journal) SetState(id BuildID, s State) error { return j.mark(Mark{ID: id, State: &s}) }
func (j *Journal) Pin(id BuildID, p Pin) error        { return j.mark(Mark{ID: id, Pin: &p}) }
func (j *Journal) Unpin(id BuildID) error             { return j.mark(Mark{ID: id}) }

func (j *Journal) AddTombstones(list []Tombstone) error {
	changes := make([]*Change, len(list))
	for i := range list {
		changes[i] = &Change{ID: list[i].BuildID, Tombstone: &list[i]}
	}
	j.addTombstones(changes)
	return changes[0].Err
}
