package index

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index/journalfile"
	"github.com/epcached/epcached/index/reserve"
)

// The samples were written by the first epcached of their format and are never
// written again: whatever is installed later has to read them.
func sample(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "testdata", "format", "v1", name))
	require.NoError(t, err)
	return b
}

// v1Build is what the sample of a manifest holds.
func v1Build() Build {
	b := sampleBuild()
	b.ID = BuildID{0xa1, 0xb2, 0xc3}
	return b
}

func v1Events() []Event {
	return []Event{
		{At: time.Unix(1_790_000_000, 1).UTC(), Kind: "compiled", RequestKey: RequestKey{3},
			BuildID: BuildID{0xa1, 0xb2, 0xc3}, Text: "in 1.5 s"},
		{At: time.Unix(1_790_000_100, 2).UTC(), Kind: "failed", RequestKey: RequestKey{3},
			Text: "compiler crashed"},
	}
}

var v1State = State{Name: Withheld, Reason: "reported by uid 1000",
	At: time.Unix(1_790_000_200, 0).UTC()}

func TestManifestOfFormat1(t *testing.T) {
	got, err := decodeManifest("sample", sample(t, "manifest"))
	require.NoError(t, err)
	require.Equal(t, v1Build(), got)
}

func TestJournalOfFormat1(t *testing.T) {
	dir := memoryDir(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "journal"), sample(t, "journal"), 0o600))
	j, damage, err := openJournal(cas.OS{}, dir, reserve.New(cas.OS{}, dir))
	require.NoError(t, err)
	require.NoError(t, damage)
	require.Equal(t, map[BuildID]State{{0xa1, 0xb2, 0xc3}: v1State}, j.states)
	require.Equal(t, v1Events(), j.events)
	require.NoError(t, j.close())
}

func TestJournalDamage(t *testing.T) {
	sound := sample(t, "journal")
	first := journalfile.HeaderSize + recordLength(t, sound[journalfile.HeaderSize:])
	change := func(at int) []byte {
		b := append([]byte(nil), sound...)
		b[at] ^= 1
		return b
	}
	for _, c := range []struct {
		name    string
		file    []byte
		events  int
		damaged bool
	}{
		{"sound", sound, 2, false},
		{"last record cut short, as by a crash", sound[:len(sound)-1], 2, false},
		{"header of a record cut short", sound[:first+10], 1, false},
		{"bit flipped in the first record", change(journalfile.HeaderSize + 40), 1, true},
		{"marker of the first record", change(journalfile.HeaderSize), 1, true},
		{"length of the first record", change(journalfile.HeaderSize + 7), 1, true},
		{"checksum of the header", change(20), 2, true},
		{"magic", change(0), 0, true},
		{"empty", nil, 0, true},
		{"header only", sound[:journalfile.HeaderSize], 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := memoryDir(t)
			path := filepath.Join(dir, "journal")
			require.NoError(t, os.WriteFile(path, c.file, 0o600))
			j, damage, err := openJournal(cas.OS{}, dir, reserve.New(cas.OS{}, dir))
			require.NoError(t, err)
			require.Equal(t, c.damaged, damage != nil, "%v", damage)
			require.Len(t, j.events, c.events)
			aside, err := filepath.Glob(filepath.Join(dir, "quarantine", "*-journal.damaged"))
			require.NoError(t, err)
			require.Equal(t, c.damaged, len(aside) == 1)
			require.NoError(t, j.note(Event{Kind: "added"}))
			require.NoError(t, j.close())

			again, damage, err := openJournal(cas.OS{}, dir, reserve.New(cas.OS{}, dir))
			require.NoError(t, err)
			require.NoError(t, damage)
			require.Len(t, again.events, c.events+1)
			require.NoError(t, again.close())
		})
	}
}

func recordLength(t *testing.T, b []byte) int {
	t.Helper()
	_, n := journalfile.ParseRecord(b)
	require.NotZero(t, n)
	return n
}

func TestAJournalOfANewerEpcachedIsLeftAlone(t *testing.T) {
	dir := memoryDir(t)
	file := sample(t, "journal")
	file[8] = 2
	path := filepath.Join(dir, "journal")
	require.NoError(t, os.WriteFile(path, file, 0o600))
	_, err := Open(dir, Options{})
	var newer *NewerError
	require.ErrorAs(t, err, &newer)
	require.Equal(t, uint32(2), newer.Version)
	left, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, file, left)
}

func TestTheJournalIsBounded(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	b := publish(t, x)
	require.NoError(t, x.Journal.SetState(b.ID, v1State))
	text := strings.Repeat("x", maxText)
	for range 2 * maxJournal / maxText {
		require.NoError(t,
			x.Journal.AddEvent(ctx, Event{Kind: "failed", RequestKey: b.RequestKey, Text: text}))
	}
	info, err := os.Stat(filepath.Join(dir, "journal"))
	require.NoError(t, err)
	require.LessOrEqual(t, info.Size(), int64(maxJournal+maxText+1000))
	closeSound(t, x)
	x = open(t, dir)
	require.Equal(t, v1State, x.Journal.StateOf(b.ID))
	closeSound(t, x)
}

func FuzzManifest(f *testing.F) {
	f.Add(sample(f, "manifest"))
	whole := sample(f, "manifest")
	f.Add(whole[headerSize : len(whole)-manifestSumSize])
	f.Fuzz(func(t *testing.T, file []byte) {
		// Checksums keep a fuzzer out: what is inside is tried as well.
		if b, err := unmarshalBuild(file); err == nil {
			requireRoundTrip(t, b)
		}
		b, err := decodeManifest("f", file)
		if err == nil {
			requireRoundTrip(t, b)
			return
		}
		var damage *DamageError
		var newer *NewerError
		require.True(t, errors.As(err, &damage) || errors.As(err, &newer), "%v", err)
	})
}

func requireRoundTrip(t *testing.T, b Build) {
	t.Helper()
	if math.IsNaN(b.CompileSeconds) {
		return // is not equal to itself
	}
	file, err := encodeManifest(b)
	require.NoError(t, err)
	again, err := decodeManifest("again", file)
	require.NoError(t, err)
	twice, err := encodeManifest(again)
	require.NoError(t, err)
	require.Equal(t, file, twice)
}

func FuzzJournal(f *testing.F) {
	f.Add(sample(f, "journal"))
	f.Add(append(sample(f, "journal"), sample(f, "journal")...))
	f.Fuzz(func(t *testing.T, file []byte) {
		j := &Journal{states: make(map[BuildID]State)}
		if _, err := journalfile.Parse(file, j.apply); err != nil {
			return
		}
		image, err := j.snapshot()
		require.NoError(t, err)
		again := &Journal{states: make(map[BuildID]State)}
		torn, damage := journalfile.Parse(image, again.apply)
		require.NoError(t, damage)
		require.False(t, torn)
		require.Len(t, again.states, len(j.states))
		require.Len(t, again.events, len(j.events))
	})
}

func FuzzRecord(f *testing.F) {
	body := sample(f, "journal")[journalfile.HeaderSize:]
	f.Add(body)
	f.Fuzz(func(t *testing.T, b []byte) {
		if body, n := journalfile.ParseRecord(b); n > 0 {
			require.Equal(t, journalfile.RecordHeaderSize+len(body), n)
			require.LessOrEqual(t, n, len(b))
		}
	})
}

func FuzzRows(f *testing.F) {
	f.Add([]byte("stamps"), []byte("key"), encodeStamp(cas.Stamp{Dev: 1, Size: 2, Boot: "boot"}))
	f.Add([]byte("use"), []byte("key"),
		encodeUse(Usage{Last: time.Unix(1, 2), Hits: 3, SavedSeconds: 4}))
	f.Add([]byte("meta"), []byte("space"), encodeRow(Space{1, 2, 3, 4, 5, 6}))
	f.Add([]byte("folders"), []byte{1}, encodeRow(dirTimes{1, 2, 3}))
	f.Fuzz(func(t *testing.T, bucket, key, value []byte) {
		bucket = bucket[:min(len(bucket), 255)]
		got, err := unseal(bucket, key, seal(bucket, key, value))
		require.NoError(t, err)
		require.Equal(t, string(value), string(got))
		_, err = unseal(bucket, append(key, 0), seal(bucket, key, value))
		require.Error(t, err)
		_, err = unseal(bucket, key, value)
		require.Error(t, err)
		if s, ok := decodeStamp(value); ok {
			require.Equal(t, string(value), string(encodeStamp(s)))
		}
		if u := decodeUse(value); u != (Usage{}) {
			require.Equal(t, string(value), string(encodeUse(u)))
		}
		if s := (Space{}); decodeRow(value, &s) {
			require.Equal(t, string(value), string(encodeRow(s)))
		}
		if times := (dirTimes{}); decodeRow(value, &times) {
			require.Equal(t, string(value), string(encodeRow(times)))
		}
	})
}

func TestParseIDs(t *testing.T) {
	id := BuildID{1, 0xab}
	got, err := ParseBuildID(id.String())
	require.NoError(t, err)
	require.Equal(t, id, got)
	for _, bad := range []string{"", "ab", strings.ToUpper(id.String()), strings.Repeat("g", 32),
		id.String() + "00"} {
		_, err := ParseBuildID(bad)
		require.Error(t, err, bad)
	}
}

func BenchmarkLookup(b *testing.B) {
	x, err := Open(b.TempDir(), Options{})
	require.NoError(b, err)
	defer func() { require.NoError(b, x.Close()) }()
	build := sampleBuild()
	require.NoError(b, x.Publish(ctx, build))
	b.Run("from memory", func(b *testing.B) {
		for b.Loop() {
			if got, err := x.Lookup(build.RequestKey, build.Scope); err != nil || len(got) != 1 {
				b.Fatal(err)
			}
		}
	})
	b.Run("from the database", func(b *testing.B) {
		for b.Loop() {
			x.entries.Drop(lookupKey{build.RequestKey, build.Scope})
			if got, err := x.Lookup(build.RequestKey, build.Scope); err != nil || len(got) != 1 {
				b.Fatal(err)
			}
		}
	})
	b.Run("use", func(b *testing.B) {
		for b.Loop() {
			x.Uses.Add(build.ID, time.Now(), 1, 1)
		}
	})
	b.Run("publish", func(b *testing.B) {
		for b.Loop() {
			if err := x.Publish(ctx, sampleBuild()); err != nil {
				b.Fatal(err)
			}
		}
	})
}
