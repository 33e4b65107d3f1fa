package cache

import (
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

func (b *bench) recipePath(d cas.Digest) string {
	return filepath.Join(b.state, "recipes", d.String()[:2], d.String())
}

// forge puts a recipe that is sound in itself into the place of a blob's own.
func (b *bench) forge(of cas.Digest, r *dedupe.Recipe) {
	b.Helper()
	raw, err := r.Encode()
	require.NoError(b, err)
	path := b.recipePath(of)
	require.NoError(b, os.MkdirAll(filepath.Dir(path), 0o755))
	if err := os.Remove(path); err != nil {
		require.ErrorIs(b, err, os.ErrNotExist)
	}
	require.NoError(b, os.WriteFile(path, raw, 0o444))
}

// Well-formed recipes with valid checksums and false contents.
func TestForgedRecipesAreNeverServed(t *testing.T) {
	const nowhere, loop = "a base that is nowhere",
		"a base that is made of the blob itself"
	cases := map[string]func(b *bench, builds []*index.Build, r *dedupe.Recipe){
		"bytes behind the end of a base": func(_ *bench, _ []*index.Build, r *dedupe.Recipe) {
			i := largest(r)
			r.Extents[i].From = r.Bases[r.Extents[i].Base].Size
			r.Bases[r.Extents[i].Base].Size += r.Extents[i].Length
		},
		"other bytes of a base": func(_ *bench, _ []*index.Build, r *dedupe.Recipe) {
			i := largest(r)
			r.Extents[i].From -= 4
		},
		"a base that is longer than it says": func(_ *bench, _ []*index.Build,
			r *dedupe.Recipe) {
			i := largest(r)
			r.Bases[r.Extents[i].Base].Size = r.Extents[i].From + r.Extents[i].Length
		},
		"a longer blob": func(_ *bench, _ []*index.Build, r *dedupe.Recipe) {
			last := r.Extents[largest(r)]
			last.At, last.Length, last.Period = r.Size, 1, 0
			r.Extents, r.Size = append(r.Extents, last), r.Size+1
		},
		"a shorter blob": func(_ *bench, _ []*index.Build, r *dedupe.Recipe) {
			last := &r.Extents[len(r.Extents)-1]
			last.Length, last.Period = last.Length-1, 0
			r.Size--
		},
		"a gigabyte of one byte": func(_ *bench, _ []*index.Build, r *dedupe.Recipe) {
			last := r.Extents[largest(r)]
			last.At, last.Length, last.Period = r.Size, 1<<30, 1
			r.Extents, r.Size = append(r.Extents, last), r.Size+1<<30
		},
		"a petabyte of one byte": func(_ *bench, _ []*index.Build, r *dedupe.Recipe) {
			last := r.Extents[largest(r)]
			last.At, last.Length, last.Period = r.Size, 1<<50, 1
			r.Extents, r.Size = append(r.Extents, last), r.Size+1<<50
		},
		"another's blob": func(_ *bench, builds []*index.Build, r *dedupe.Recipe) {
			r.Blob = cas.Digest{1}
		},
		nowhere: func(_ *bench, _ []*index.Build, r *dedupe.Recipe) {
			r.Bases[r.Extents[largest(r)].Base].Digest = cas.Digest{1}
		},
		loop: func(b *bench, builds []*index.Build, r *dedupe.Recipe) {
			of := large(builds[0])
			info, err := os.Stat(b.object(of))
			require.NoError(b, err)
			require.NoError(b, os.Remove(b.object(of)))
			b.forge(of, &dedupe.Recipe{Blob: of, Size: info.Size(), Literals: dedupe.NoLiterals,
				Bases: []dedupe.Base{{Digest: r.Blob, Size: r.Size}},
				Extents: []dedupe.Extent{{Length: info.Size(),
					Period: min(r.Size, info.Size()-1)}}})
		},
	}
	packed := packedPairs(t)
	for name, forge := range cases {
		for when, restart := range map[string]bool{"running": false, "restarted": true,
			"read only": true} {
			t.Run(name+", "+when, func(t *testing.T) {
				b, builds, files := packed(t)
				r, err := dedupe.ReadRecipeStore(b.state).Get(large(builds[1]))
				require.NoError(t, err)
				if !restart {
					b.openSound()
				}
				forge(b, builds, r)
				b.forge(large(builds[1]), r)
				if when == "read only" {
					require.ErrorContains(t, b.requireNotFoundWithout(),
						builds[1].BuildKey.String()[:12])
					return
				}
				if restart {
					b.openSound()
				}
				b.requireRecompiled(builds[1], files[1])
				require.Contains(t, kinds(b.events(b.self())), event.Damaged)
				first := b.acquire(b.variant(1))
				require.Equal(t, files[0], b.read(first))
				if name == nowhere || name == loop {
					return // it is a base that is missed, and there is nothing to put aside
				}
				aside, err := filepath.Glob(filepath.Join(b.cache.path("quarantine"),
					"*"+large(builds[1]).String()[:16]+"*"))
				require.NoError(t, err)
				require.NotEmpty(t, aside, "it is in quarantine")
			})
		}
	}
}

// requireFound requires that a check, which changes nothing, names the damage of a blob and the
// builds that need it.
func (b *bench) requireFound(d cas.Digest, whose ...*index.Build) {
	b.Helper()
	result, err := b.cache.Check(context.Background(), b.self(), &wire.Check{Deep: true}, nil)
	require.NoError(b, err)
	var damaged []string
	found := false
	for _, f := range result.Findings {
		found = found || strings.Contains(f.Object, d.String()) && f.Detail != ""
		damaged = append(damaged, f.Builds...)
	}
	require.True(b, found, "%v", result.Findings)
	for _, build := range whose {
		require.Contains(b, damaged, build.BuildKey.String())
	}
}

// largest is the extent with the most bytes, which begin behind the start of a base.
func largest(r *dedupe.Recipe) int {
	at := -1
	for i, e := range r.Extents {
		if e.From >= 4 && e.Base != r.Literals && (at < 0 || e.Length > r.Extents[at].Length) {
			at = i
		}
	}
	return at
}

func (b *bench) object(d cas.Digest) string {
	return filepath.Join(b.state, "objects", d.String()[:2], d.String())
}

// Malformed recipes with valid checksums: offsets are those of doc/format.md. Extents that overlap
// or leave a gap cannot be written: each begins where the one before ends.
func TestUnsoundRecipesAreNeverServed(t *testing.T) {
	const newer = "of a newer version"
	number := func(at int, v uint64) func([]byte) []byte {
		return func(raw []byte) []byte { binary.LittleEndian.PutUint64(raw[at:], v); return raw }
	}
	count := func(at int, v uint32) func([]byte) []byte {
		return func(raw []byte) []byte { binary.LittleEndian.PutUint32(raw[at:], v); return raw }
	}
	const version, length, size, extents, literals, firstSize = 8, 12, 48, 60, 68, 104
	cases := map[string]func(raw []byte) []byte{
		"no bytes":                  func([]byte) []byte { return nil },
		"cut off in the header":     func(raw []byte) []byte { return raw[:12] },
		"cut off in the body":       func(raw []byte) []byte { return raw[:len(raw)/2] },
		"something behind the body": func(raw []byte) []byte { return append(raw, 0) },
		"no version":                count(version, 0),
		newer:                       count(version, 3),
		"a size of 2^63":            number(size, 1<<63),
		"a size of nearly 2^63":     number(size, 1<<63-1),
		"a size above all limits":   number(size, 1<<56+1),
		"a base of 2^63 bytes":      number(firstSize, 1<<63),
		"a base of no bytes":        number(firstSize, 0),
		"four billion extents":      count(extents, 1<<32-1),
		"literals in no base":       count(literals, 200),
		"an extent of another base": func(raw []byte) []byte {
			raw[72+40*int(raw[56])] = 0x7e
			return raw
		},
		"the blob is its own base": func(raw []byte) []byte {
			copy(raw[72:104],
				raw[16:48])
			return raw
		},
		"a base twice": func(raw []byte) []byte {
			copy(raw[112:144],
				raw[72:104])
			return raw
		},
	}
	packed := packedPairs(t)
	for name, harm := range cases {
		for when, restart := range map[string]bool{"running": false, "restarted": true,
			"read only": true} {
			t.Run(name+", "+when, func(t *testing.T) {
				b, builds, files := packed(t)
				path := b.recipePath(large(builds[1]))
				raw, err := os.ReadFile(path)
				require.NoError(t, err)
				require.EqualValues(t, 2, raw[56], "bases")
				if !restart {
					b.openSound()
				}
				raw = harm(raw[:len(raw)-32])
				if len(raw) > length+4 {
					binary.LittleEndian.PutUint32(raw[length:], uint32(len(raw)-16))
				}
				sum := blake3.Sum256(raw)
				require.NoError(t, os.Remove(path))
				require.NoError(t, os.WriteFile(path, append(raw, sum[:]...), 0o444))
				if when == "read only" {
					_, err := b.stored().Find(context.Background(), b.variant(2), "")
					require.Error(t, err)
					require.True(t, packing.IsMissingOrDamaged(err) ||
						apierr.ClassOf(err) == apierr.NotFound ||
						name == newer, "%v", err)
					require.ErrorContains(t, err, builds[1].BuildKey.String()[:12])
					return
				}
				if restart {
					b.openSound()
				}
				b.requireFound(large(builds[1]), builds[1])
				a := b.acquire(b.variant(2))
				require.Equal(t, request.Compiled, a.Outcome)
				require.Equal(t, files[1], b.read(a))
				first := b.acquire(b.variant(1))
				require.Equal(t, request.Hit, first.Outcome, "the base is as it was")
				require.Equal(t, files[0], b.read(first))
				aside, err := filepath.Glob(filepath.Join(b.cache.path("quarantine"),
					"*"+large(builds[1]).String()[:16]+"*"))
				require.NoError(t, err)
				if name == newer {
					require.Empty(t, aside, "another epcached can read it")
					return
				}
				require.NotEmpty(t, aside, "it is in quarantine")
				require.Contains(t, a.Why, "damaged")
				require.Contains(t, kinds(b.events(b.self())), event.Damaged)
			})
		}
	}
}

// requireNotFoundWithout requires that a reader of the store without a daemon is not given the
// second variant, and returns the error.
func (b *bench) requireNotFoundWithout() error {
	b.Helper()
	_, err := b.stored().Find(context.Background(), b.variant(2), "")
	require.Error(b, err)
	require.True(b, packing.IsMissingOrDamaged(err) ||
		apierr.ClassOf(err) == apierr.NotFound, "%v", err)
	return err
}

// requireRecompiled requires that a check names the build of the second variant, and that a request
// for it gets its files, recompiled.
func (b *bench) requireRecompiled(build *index.Build, files map[string]string) {
	b.Helper()
	b.requireFound(large(build), build)
	a := b.acquire(b.variant(2))
	require.Equal(b, request.Compiled, a.Outcome)
	require.Contains(b, a.Why, "damaged")
	require.Equal(b, files, b.read(a))
}
