package identity

import (
	"bytes"
	"flag"
	"fmt"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
)

var update = flag.Bool("update", false, "write clients/python/epcache/_session_keys.py")

// noEntries are strings of the libraries that look like session config entries, and are none.
var noEntries = map[string]string{
	"ep.cuda.":                              "what several entries begin with",
	"ep.cudaexecutionprovider.":             "what provider options are kept under",
	"session.moe.offload.":                  "what several entries begin with",
	"session.moe.offload.gpu_budget_bytes.": "what the budgets of single devices begin with",
	"ep.openvinoexecutionprovider.hardware_device_type": "how ONNX Runtime keeps a provider " +
		"option; " +
		"as an entry it is unknown, and refused",
}

// areas are what session config entries begin with.
var areas = []string{"session.", "ep.", "optimization.", "mlas."}

// keyLike yields what may be session config entries in a library, each with the byte before it and
// the one after.
func keyLike(library []byte) iter.Seq2[string, [2]byte] {
	inKey := func(c byte) bool {
		return c == '.' || c == '_' || c >= 'a' && c <= 'z' ||
			c >= '0' && c <= '9'
	}
	return func(yield func(string, [2]byte) bool) {
		for _, begin := range areas {
			for at := 0; ; at++ {
				next := bytes.Index(library[at:], []byte(begin))
				if next < 0 {
					break
				}
				at += next
				end := at + len(begin)
				for end < len(library) && inKey(library[end]) {
					end++
				}
				around := [2]byte{library[max(0, at-1)], library[min(end, len(library)-1)]}
				if at > 0 && inKey(around[0]) || end == at+len(begin) {
					continue // the end of a longer word, or nothing follows
				}
				if !yield(string(library[at:end]), around) {
					return
				}
			}
		}
	}
}

// unclassified returns the session config entries in a library's bytes that the table lacks.
// Compilers cut constants into pieces of 8 or 16 bytes, so that only the beginning of some is
// there.
func unclassified(library []byte) []string {
	missing := map[string]bool{}
	for found, around := range keyLike(library) {
		if sessionKeys[found].Class != "" || noEntries[found] != "" {
			continue
		}
		piece := found
		switch {
		case len(found) >= 16:
			piece = found[:16]
		case len(found) >= 8:
			piece = found[:8]
		default:
			continue
		}
		begins := func(key string) bool { return strings.HasPrefix(key, piece) }
		pieces := slices.ContainsFunc(areas,
			func(area string) bool { return strings.Contains(found[1:], area) })
		if around == [2]byte{} && !pieces ||
			!slices.ContainsFunc(slices.Collect(maps.Keys(sessionKeys)), begins) {
			missing[found] = true
		}
	}
	return slices.Sorted(maps.Keys(missing))
}

// An entry that is not known is refused, so each that a runtime brings has to be in the table.
func TestEveryEntryOfTheInstalledRuntimesIsClassified(t *testing.T) {
	dir := os.Getenv("EPCACHED_RUNTIMES")
	if dir == "" {
		t.Skip("NOT TESTED: EPCACHED_RUNTIMES is not set; `make test` sets it")
	}
	var libraries []string
	for _, pattern := range []string{
		"*/onnxruntime/capi/libonnxruntime.so*", "*/onnxruntime/capi/libonnxruntime_providers_*.so",
		"*/onnxruntime_*/libonnxruntime_providers_*.so", "*/onnxruntime_*/libvendor_*.so",
	} {
		found, err := filepath.Glob(filepath.Join(dir, pattern))
		require.NoError(t, err)
		libraries = append(libraries, found...)
	}
	require.NotEmpty(t, libraries)
	read := map[string]bool{}
	for _, path := range libraries {
		library, err := os.ReadFile(path)
		require.NoError(t, err)
		same := fmt.Sprint(filepath.Base(path), len(library))
		if read[same] {
			continue // in another runtime
		}
		read[same] = true
		require.Empty(t, unclassified(library),
			"%s: classify them in session.toml, or say in noEntries what they are", path)
	}
}

func TestUnclassifiedEntriesAreFound(t *testing.T) {
	data := []byte(
		"\x00session.no_such_entry\x00x\x00session.intra_op.allow_spinning\x00mlas.disable_kleX9" +
			"\x00optimization.nothing_known,")
	require.Equal(t, []string{"optimization.nothing_known", "session.no_such_entry"},
		unclassified(data))
	require.Equal(t, []string{"session.intra_op"}, unclassified([]byte("\x00session.intra_op\x00")),
		"whole, and only the beginning of one")
}

func requestKey(t *testing.T, entries map[string]string) string {
	terms := Terms{CompileTerms: CompileTerms{EPs: []EP{{Name: "QNNExecutionProvider"}},
		Session: compilers.Session{SessionOptions: entries}}}
	record, err := terms.Record(t.Context(), nil, UnresolvedDevices)
	require.NoError(t, err)
	key, _ := record.Key()
	return key.String()
}

func TestOnlyEntriesThatConcernTheCompileChangeTheKey(t *testing.T) {
	plain := requestKey(t, nil)
	for key, rule := range sessionKeys {
		entries := map[string]string{key: "7"}
		if rule.Kind == "bool" {
			entries[key] = map[string]string{"1": "false"}[rule.Default]
			if entries[key] == "" {
				entries[key] = "true"
			}
		}
		compile, _ := SplitSession(entries)
		switch rule.Class {
		case classRun, classServe:
			require.Equal(t, plain, requestKey(t, entries), key)
			require.Empty(t, compile, "%s is not given to a compile", key)
		case classCompile:
			require.NotEqual(t, plain, requestKey(t, entries), key)
			require.Equal(t, entries, compile, key)
		default:
			terms := Terms{CompileTerms: CompileTerms{EPs: []EP{{Name: "QNNExecutionProvider"}},
				Session: compilers.Session{SessionOptions: entries}}}
			_, err := terms.Record(t.Context(), Allowed{"session/" + key}, UnresolvedDevices)
			require.ErrorContains(t, err, key, "refused, whatever an administrator allows")
		}
	}
}

func TestOptimalBuildsOnly(t *testing.T) {
	for value, want := range map[string]bool{"1": true, "0": false, "true": false} {
		entries := map[string]string{onlyOptimal: value, "session.x64quantprecision": "1",
			"session.log_id": "x"}
		compile, optimal := SplitSession(entries)
		require.Equal(t, want, optimal, value)
		require.Equal(t, map[string]string{"session.x64quantprecision": "1"}, compile)
		require.Len(t, entries, 3, "the caller's stays as it is")
	}
}

func TestSessionTableIsWellFormed(t *testing.T) {
	for key, rule := range sessionKeys {
		require.Contains(t, []string{"", "bool", "int"}, rule.Kind, key)
		require.NotEqual(t, rule.Class == classRefused, rule.Because == "",
			"%s: the reason of what is refused", key)
	}
	for name, data := range map[string]string{
		"twice":         "run = [\"a.b\"]\nserve = [\"a.b\"]",
		"unknown field": "walk = [\"a.b\"]",
		"unknown word":  "[compile]\n\"a.b\" = { sort = \"int\" }",
	} {
		_, err := parseSession([]byte(data))
		require.Error(t, err, name)
	}
}

// pythonTable is the table as the Python client has it.
func pythonTable() []byte {
	var out bytes.Buffer
	out.WriteString("\"\"\"The classes of session config entries.\n\n" +
		"Written by `make session-keys` from cache/identity/session.toml.\n\"\"\"\n\n" +
		"from __future__ import annotations\n\n")
	set := func(name string, class sessionClass) {
		fmt.Fprintf(&out, "%s = frozenset(\n    (\n", name)
		for _, key := range slices.Sorted(maps.Keys(sessionKeys)) {
			if sessionKeys[key].Class == class {
				fmt.Fprintf(&out, "        %q,\n", key)
			}
		}
		out.WriteString("    )\n)\n")
	}
	set("RUN", classRun)
	set("SERVE", classServe)
	set("DIRECTORY", classDir)
	out.WriteString("REFUSED = {\n")
	for _, key := range slices.Sorted(maps.Keys(sessionKeys)) {
		if rule := sessionKeys[key]; rule.Class == classRefused {
			fmt.Fprintf(&out, "    %q: %q,\n", key, rule.Because)
		}
	}
	out.WriteString("}\n")
	return out.Bytes()
}

func TestPythonHasTheSameTable(t *testing.T) {
	path := filepath.Join("..", "..", "clients", "python", "epcache", "_session_keys.py")
	if *update {
		require.NoError(t, os.WriteFile(path, pythonTable(), 0o644))
	}
	have, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(pythonTable()), string(have), "make session-keys writes it")
}

// An entry for an EP's factory would have no effect in a worker, so it is refused, also if the
// configuration allows unknown entries.
func TestEntriesOfFactoriesAreRefused(t *testing.T) {
	const key = "ep_factory.XExecutionProvider.path"
	for _, allowed := range []Allowed{nil, {"session/" + key}} {
		_, err := allowed.canonicalSession(map[string]string{key: "1"})
		require.ErrorContains(t, err, `"`+key+`" is not accepted from clients: it configures`)
	}
}
