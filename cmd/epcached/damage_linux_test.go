package main

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// A damage is done to a stored file behind the daemon's back. Execution providers load most of what
// comes of these, some with wrong results.
type damage struct {
	graph bool // to the graph; else to the context binary
	do    func(t testing.TB, path string)
}

// The ways in which stored files go bad: what disks, tools and people do to a context binary, and
// what a graph would have to say to lead an execution provider astray.
var damages = map[string]damage{
	"one bit of the binary": {false, edited(func(_ testing.TB, b []byte) []byte {
		b[len(b)/2] ^= 0x40
		return b
	})},
	"one bit of the binary, time put back": {false, func(t testing.TB, path string) {
		info, err := os.Stat(path)
		require.NoError(t, err)
		edited(func(_ testing.TB, b []byte) []byte {
			b[len(b)-5] ^= 1
			return b
		})(t, path)
		require.NoError(t, os.Chtimes(path, info.ModTime(), info.ModTime()))
	}},
	"last byte missing": {false,
		edited(func(_ testing.TB, b []byte) []byte { return b[:len(b)-1] })},
	"4 KiB of zeros appended": {false, edited(func(_ testing.TB, b []byte) []byte {
		return append(b, make([]byte, 4096)...)
	})},
	"half of the binary": {false,
		edited(func(_ testing.TB, b []byte) []byte { return b[:len(b)/2] })},
	"nothing in the binary": {false, edited(func(testing.TB, []byte) []byte { return nil })},
	"binary missing": {false,
		func(t testing.TB, path string) { require.NoError(t, os.Remove(path)) }},
	"directory missing": {false,
		func(t testing.TB, path string) { require.NoError(t, os.RemoveAll(filepath.Dir(path))) }},
	"other bytes by rename": {false, func(t testing.TB, path string) {
		b := contentOf(t, path)
		b[len(b)/2] ^= 1
		require.NoError(t, os.WriteFile(path+".new", b, 0o444))
		require.NoError(t, os.Rename(path+".new", path))
	}},
	"symbolic link to other bytes": {false, func(t testing.TB, path string) {
		b := contentOf(t, path)
		b[len(b)/2] ^= 1
		linkTo(t, path, b)
	}},
	"symbolic link to the same bytes": {false,
		func(t testing.TB, path string) { linkTo(t, path, contentOf(t, path)) }},
	"directory in its place": {false, func(t testing.TB, path string) {
		require.NoError(t, os.Remove(path))
		require.NoError(t, os.Mkdir(path, 0o755))
	}},

	"graph missing": {true,
		func(t testing.TB, path string) { require.NoError(t, os.Remove(path)) }},
	"no compatibility string": {true, edited(func(t testing.TB, b []byte) []byte {
		without := withoutMetadata(t, b, "ep_compatibility_info.")
		require.NotEqual(t, b, without)
		return without
	})},
	"compatibility string of another SDK": {true, edited(func(t testing.TB, b []byte) []byte {
		return []byte(strings.NewReplacer("ov=2026.4.1", "ov=2025.1.0", "v2:6:2.", "v2:6:1.").
			Replace(string(b)))
	})},
	"another partition name": {true,
		attribute("partition_name", func(old string) string { return "x" + old[1:] })},
	"another source": {true,
		attribute("source", func(string) string { return "CPUExecutionProvider" })},
	"another SDK version": {true,
		attribute("ep_sdk_version", func(old string) string { return "9" + old })},
	"path to the binary: absolute": {true,
		attribute("ep_cache_context", func(old string) string { return "/tmp/" + old })},
	"path to the binary: parent": {true,
		attribute("ep_cache_context", func(old string) string { return "../" + old })},
	"path to the binary: subdirectory": {true,
		attribute("ep_cache_context", func(old string) string { return "sub/" + old })},
	"path to the binary: another": {true,
		attribute("ep_cache_context", func(old string) string { return "another.bin" })},
}

// edited writes other bytes into the same file, as a tool or a disk does: links to it have them
// too.
func edited(change func(testing.TB, []byte) []byte) func(testing.TB, string) {
	return func(t testing.TB, path string) {
		before := contentOf(t, path)
		after := change(t, bytes.Clone(before))
		require.NotEqual(t, before, after, "nothing is damaged")
		require.NoError(t, os.Chmod(path, 0o644))
		require.NoError(t, os.WriteFile(path, after, 0o644))
		require.NoError(t, os.Chmod(path, 0o444))
	}
}

func attribute(name string, change func(string) string) func(testing.TB, string) {
	return edited(func(t testing.TB, b []byte) []byte { return withAttribute(t, b, name, change) })
}

func contentOf(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return b
}

func linkTo(t testing.TB, path string, content []byte) {
	t.Helper()
	elsewhere := filepath.Join(t.TempDir(), "elsewhere")
	require.NoError(t, os.WriteFile(elsewhere, content, 0o644))
	require.NoError(t, replaceLink(elsewhere, path))
}

// object is the stored file of the answer that is, or is not, the graph.
func (a lease) object(t testing.TB, state string, graph bool) string {
	t.Helper()
	for _, f := range a.Files {
		if (f.Name == a.Graph) == graph {
			return filepath.Join(state, "objects", f.Digest[:2], f.Digest)
		}
	}
	require.Fail(t, "no such file", "%v", a.Files)
	return ""
}

var realProviders = map[string]struct {
	runtime  string
	provider *wire.ExecutionProvider
}{"OpenVINO": {openVINO, openVINOProvider()}, "QNN": {qnn, qnnProvider()}}

// TestDamage has each damage meet a running daemon with a live view, whose files are the stored
// ones, and a daemon that is started after it. It is found before the next answer, and healed,
// because the model is at hand. The daemon finds it, not the execution provider: builds of QNN,
// which have other files, are damaged one way or the other, in turn.
func TestDamage(t *testing.T) {
	for ep, p := range realProviders {
		t.Run(ep, func(t *testing.T) {
			t.Parallel() // each has a daemon of its own, and mostly waits for it
			p := newPatient(t, p.runtime, p.provider)
			for i, name := range slices.Sorted(maps.Keys(damages)) {
				ways := []bool{false, true}
				if ep == "QNN" {
					ways = ways[i%2:][:1]
				}
				t.Run(name, func(t *testing.T) {
					for _, stopped := range ways {
						p.suffer(t, damages[name], stopped)
					}
				})
			}
		})
	}
}

// patient is a daemon with a store that is damaged again and again.
type patient struct {
	testing.TB
	*site
	*epcached
	model string
	seed  uint64
	told  int // events that were looked at
	ep    *wire.ExecutionProvider
}

func newPatient(t testing.TB, runtime string, ep *wire.ExecutionProvider) *patient {
	p := &patient{TB: t, site: newSite(t, runtimeDir(t, runtime)), ep: ep}
	p.epcached = p.site.start(t)
	p.renew()
	return p
}

// renew goes on with another model.
func (p *patient) renew() {
	p.seed++
	p.model = writeModel(p.TB, p.TB.TempDir(), p.seed)
}

func (p *patient) acquire(t *testing.T, change ...func(*wire.Acquire)) lease {
	t.Helper()
	a := get(t, p.dial(), p.model, append(change, withEPs(p.ep))...)
	a.requireRight(t)
	return a
}

// damagedBuilds returns the build keys of what was found damaged since the last call.
func (p *patient) damagedBuilds() []string {
	reply, err := unixsock.Ask[wire.EventsReply](limited(p.TB), p.dial(), &wire.Events{}, nil)
	require.NoError(p.TB, err)
	var found []string
	for _, e := range reply.Events[min(p.told, len(reply.Events)):] {
		if e.Kind == "damaged" {
			found = append(found, e.Build)
		}
	}
	p.told = len(reply.Events)
	return found
}

// suffer does the damage, under a live view or while no daemon runs, and requires that it is found
// and healed.
func (p *patient) suffer(t *testing.T, damage damage, stopped bool) {
	t.Helper()
	defer func() {
		if t.Failed() {
			p.renew() // what one damage left must not fail the next
		}
	}()
	sound := p.acquire(t)
	object := sound.object(t, p.site.state, damage.graph)
	if stopped {
		p.epcached.stop()
	}
	damage.do(t, object)
	if stopped {
		p.epcached = p.site.start(p.TB)
	}
	healed := p.acquire(t)
	require.Equal(t, "compiled", healed.Outcome, "stopped: %v", stopped)
	require.Contains(t, healed.Why, "damaged")
	require.Contains(t, p.damagedBuilds(), sound.Build)
	require.NotEqual(t, sound.Graph, healed.Graph, "a path is never used for two contents")
	require.Equal(t, "hit", p.acquire(t, onMissFail).Outcome)
}

// Applications open the files of views. After any damage to a view, the next answer has the right
// bytes, at a path that no application has loaded other bytes from.
func TestDamageToAView(t *testing.T) {
	cases := map[string]func(t testing.TB, file string){
		"file removed": func(t testing.TB, file string) { require.NoError(t, os.Remove(file)) },
		"other bytes by rename": func(t testing.TB, file string) {
			b := contentOf(t, file)
			b[0] ^= 1
			require.NoError(t, os.WriteFile(file+".new", b, 0o444))
			require.NoError(t, os.Rename(file+".new", file))
		},
		"symbolic link to the same bytes": func(t testing.TB,
			file string) {
			linkTo(t, file, contentOf(t, file))
		},
		"view removed": func(t testing.TB,
			file string) {
			require.NoError(t, os.RemoveAll(filepath.Dir(filepath.Dir(file))))
		},
		"all views removed": func(t testing.TB, file string) {
			require.NoError(t, os.RemoveAll(filepath.Join(file, "../../../..")))
		},
	}
	for ep, p := range realProviders {
		t.Run(ep, func(t *testing.T) {
			t.Parallel()
			p := newPatient(t, p.runtime, p.provider)
			for name, damage := range cases {
				t.Run(name, func(t *testing.T) {
					for _, stopped := range []bool{false, true} {
						sound := p.acquire(t)
						if stopped {
							p.epcached.stop()
						}
						for _, f := range sound.Files {
							if f.Name != sound.Graph {
								damage(t, filepath.Join(sound.View, f.Name))
							}
						}
						if stopped {
							p.epcached = p.site.start(p.TB)
						}
						again := p.acquire(t, onMissFail)
						require.Equal(t, "hit", again.Outcome, "the stored files are sound")
						require.NotEqual(t, sound.Graph, again.Graph)
					}
				})
			}
		})
	}
}
