package config

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/internal/tomlfile"
)

// load reads a text as a file, and gives the file's name too.
func load(t *testing.T, text string) (*Settings, string, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "epcached.toml")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	s, err := Load(file)
	return s, file, err
}

func TestWrongValues(t *testing.T) {
	cases := map[string]struct{ text, says string }{
		"unknown field": {"state = \"/x\"\njob = 3\n",
			`:2:1: unknown field "job"; did you mean "jobs"?`},
		"unknown field, no guess": {"frobnicate = 3\n", `:1:1: unknown field "frobnicate"`},
		"unknown table": {"\n[polcy]\nunknown = \"serve\"\n",
			`:2:2: unknown field "polcy"; did you mean "policy"?`},
		"unknown field of a runtime": {"[[runtime]]\ndirectory = \"/x\"\npath = \"/y\"\n",
			`:3:1: unknown field "runtime[1].path"`},
		"in the second runtime": {
			"[[runtime]]\ndirectory = \"/x\"\n[[runtime]]\n  directory = 5\n",
			`:4:3: field "runtime[2].directory": it is a whole number`},
		"runtime in a line": {"runtime = [{directory = \"/x\"},\n {directory = true}]\n",
			`:2:3: field "runtime[2].directory": it is true or false`},
		"runtime that is a table": {"[runtime]\ndirectory = \"/x\"\n",
			`:1:2: field "runtime": it is a table and must be an array`},
		"no TOML": {"jobs = 2\nwhat is this\n", `:2:6: expected '='`},
		"twice":   {"jobs = 1\njobs = 2\n", `:2:`},
		"log level that is no text": {"\nlog_level = 4\n",
			`:2:1: field "log_level": it is a whole number and must be a text`},
		"log level": {"log_level = \"loud\"\n",
			`:1:1: field "log_level": "loud": it must be one of debug, info, warn, error`},
		"negative time": {"[limits]\nwall = \"-5s\"\n",
			`:2:1: field "limits.wall": "-5s" is negative`},
		"negative time under its earlier name": {"[limits]\nwall_seconds = -5\n",
			`:2:1: field "limits.wall": "-5s" is negative`},
		"no number": {"[limits]\nwall_seconds = nan\n",
			`:2:1: field "limits.wall": "NaNs" is not a duration`},
		"user of the worker": {"worker_user = \"a b\"\n",
			`:1:1: field "worker_user": "a b" is not a user`},
		"user of the worker by uid": {"worker_user = 990\n",
			`:1:1: field "worker_user": it is a whole number and must be a text in quotes: ` +
				`write worker_user = "990"`},
		"what may be read": {"[sandbox]\nread = \"/x\"\n",
			`:2:1: field "sandbox.read": it is a text and must be an array`},
		"what may be written": {"[sandbox]\nwrite = [\"\"]\n",
			`:2:10: field "sandbox.write[1]": it is empty`},
		"part of a job": {"jobs = 1.5\n",
			`:1:1: field "jobs": it is a number and must be a whole number`},
		"user by name": {"administrators = [0,\n  \"root\"]\n",
			`:2:3: field "administrators[2]": it is a text and must be a whole number`},
		"nobody's user id": {"publishers = [4294967295]\n",
			`:1:15: field "publishers[1]": 4294967295 is not 0 to 4294967294`},
		"rules in a text": {"rules = \"/x\"\n",
			`:1:1: field "rules": it is a text and must be an array`},
		"empty rule": {"rules = [\"/x\", \"\"]\n",
			`:1:16: field "rules[2]": it is empty`},
		"keep source": {"keep_source = true\n",
			`:1:1: field "keep_source": it is true or false`},
		"option without EP": {"allow_options = [\"num_streams\"]\n",
			`:1:18: field "allow_options[1]": "num_streams" is not EP/option`},
		"runtime of nothing": {"[[runtime]]\n",
			`:1:3: field "runtime[1]": give either directory, or ort_library`},
		"runtime of both": {"[[runtime]]\ndirectory = \"/x\"\nort_library = \"/y\"\n",
			`:1:3: field "runtime[1]": give either`},
		"libraries beside a directory": {
			"[[runtime]]\ndirectory = \"/x\"\nep_libraries = {A = \"/y\"}\n",
			`:3:1: field "runtime[1].ep_libraries": `},
		"runtime without EP": {"[[runtime]]\nort_library = \"/y\"\n",
			`:2:1: field "runtime[1].ort_library": ort_library needs ep_libraries`},
		"driver of nobody known": {"[[driver]]\nep = \"nvidia\"\nmodule = \"nvidia\"\n",
			`:2:1: field "driver[1].ep": unknown field or execution provider "nvidia"`},
		"driver from nowhere": {"[[driver]]\nep = \"QNNExecutionProvider\"\n",
			`:1:3: field "driver[1]": give either file or command`},
		"driver from two places": {
			"[[driver]]\nep = \"QNNExecutionProvider\"\nfile = \"/x\"\ncommand = [\"y\"]\n",
			`:1:3: field "driver[1]": give either`},
		"command of nothing": {"[[driver]]\nep = \"QNNExecutionProvider\"\ncommand = []\n",
			`:3:1: field "driver[1].command": no program named`},
		"compiler of nothing": {"[[compiler]]\nep = \"QNNExecutionProvider\"\ncommand = []\n",
			`:3:1: field "compiler[1].command": no program named`},
		"compiler without a model": {
			"[[compiler]]\nep = \"QNNExecutionProvider\"\ncommand = [\"/c\", \"{output}\"]\n",
			`:3:1: field "compiler[1].command": its arguments need {model}`},
		"unknown placeholder": {"[[compiler]]\nep = \"QNNExecutionProvider\"\ncommand = " +
			"[\"/c\", \"{model}\", \"{out}\"]\n",
			`:3:1: field "compiler[1].command": "{out}": unknown placeholder "{out}"`},
		"compiler for nobody known": {
			"[[compiler]]\nep = \"qnn\"\ncommand = [\"/c\", \"{model}\", \"{output}\"]\n",
			`:2:1: field "compiler[1].ep": unknown field or execution provider "qnn"`},
		"two compilers for one": {"[[compiler]]\nep = \"QNNExecutionProvider\"\ncommand = " +
			"[\"/c\", \"{model}\", \"{output}\"]\n" +
			"[[compiler]]\nep = \"QNNExecutionProvider\"\ncommand = [\"/d\", \"{model}\", " +
			"\"{output}\"]\n",
			`:4:3: field "compiler[2]": QNNExecutionProvider has a compiler already`},
		"budget as a number": {"[space]\nbudget = 100000000\n",
			`:2:1: field "space.budget": it is a whole number and must be a text in quotes: ` +
				`write budget = "100000000"`},
		"budget without a unit": {"[space]\nbudget = \"20\"\n",
			`:2:1: field "space.budget": "20" is less than 64KiB`},
		"quota without a unit": {"[space]\nuser_share = \"20\"\n",
			`:2:1: field "space.user_share": "20" is less than 64KiB`},
		"floor of everything": {"[space]\nfree_floor = \"100%\"\n",
			`:2:1: field "space.free_floor": "100%" would keep no builds`},
		"unknown verdict": {"[policy]\nunknown = \"guess\"\n",
			`:2:1: field "policy.unknown": "guess": it must be one of load_check, serve, refuse`},
		"age": {"[policy]\nmax_age = \"90 days\"\n",
			`:2:1: field "policy.max_age": "90 days" is not a duration`},
		"age as a number": {"[policy]\nmax_age = 90\n",
			`:2:1: field "policy.max_age": it is a whole number and must be a text`},
		"unknown field of an EP": {"[policy.QNNExecutionProvider]\nmax_ages = \"1d\"\n",
			`:2:1: unknown field "policy.QNNExecutionProvider.max_ages"; did you mean "max_age"?`},
		"misspelled EP": {"[policy.QNNExecutionProvide]\nmax_age = \"1d\"\n",
			`:1:9: field "policy.QNNExecutionProvide": unknown execution provider ` +
				`"QNNExecutionProvide"; did you mean "QNNExecutionProvider"?`},
		"EP in other letters": {"[policy.OpenvinoExecutionProvider]\n",
			`did you mean "OpenVINOExecutionProvider"?`},
		"policy of something else": {"[policy.npu]\n",
			`:1:9: field "policy.npu": unknown field or execution provider "npu"`},
		"policy that is none": {"policy = 5\n",
			`:1:1: field "policy": it is a whole number and must be a table`},
		"window": {"[rebuild]\nwindow = \"22-6\"\n",
			`:2:1: field "rebuild.window": "22-6" is not a time span`},
		"window of no length": {"[rebuild]\nwindow = \"06:00-06:00\"\n",
			`:2:1: field "rebuild.window": "06:00-06:00" has no length`},
		"hour 25": {"[rebuild]\nwindow = \"25:00-06:00\"\n",
			`:2:1: field "rebuild.window"`},
		"no pause": {"[space]\npack_after = \"0s\"\n",
			`:2:1: field "space.pack_after": "0s" is not 1s to 365d`},
		"pause that is none": {"[space]\npack_after = \"soon\"\n",
			`:2:1: field "space.pack_after": "soon" is not a duration`},
		"empty pause": {"[space]\npack_after = \"\"\n",
			`:2:1: field "space.pack_after": "" is not a duration`},
		"idle for an instant": {"idle_exit = \"soon\"\n",
			`:1:1: field "idle_exit": "soon" is not a duration`},
		"a time for a text": {"state = 2026-11-21\n", `:1:1: field "state": it is a time`},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, file, err := load(t, c.text)
			var wrong Errors
			require.ErrorAs(t, err, &wrong)
			require.Len(t, wrong, 1, err)
			require.Contains(t, err.Error(), c.says)
			require.Contains(t, err.Error(), file+":")
		})
	}
}

// All mistakes of a file are reported at once.
func TestAllErrorsAtOnce(t *testing.T) {
	_, file, err := load(t, "[rebuild]\nenabled = 0\n[limits]\nmemory_bytes = -1\nspeed = "+
		"3\n[[driver]]\nfile = \"\"\n")
	require.Equal(t, strings.Join([]string{
		file + `:2:1: field "rebuild.enabled": it is a whole number and must be true or false`,
		file + `:4:1: field "limits.memory_bytes": -1 is not 0 or more`,
		file + `:5:1: unknown field "limits.speed"; the fields are memory_bytes, output_bytes, ` +
			`wall`,
		file + `:7:1: field "driver[1].file": it is empty`,
	}, "\n"), err.Error())
}

func TestFilesThatCannotBeRead(t *testing.T) {
	_, err := Load("/no/such/file.toml")
	require.ErrorIs(t, err, os.ErrNotExist)
	require.Equal(t, "/no/such/file.toml: no such file or directory", err.Error())
	_, _, err = load(t, strings.Repeat("# much ado\n", tomlfile.MaxSize/11+1))
	require.ErrorContains(t, err, "larger than 1048576 bytes")
	var wrong Errors
	require.False(t, errors.As(err, &wrong), "it is not the content that is wrong")
}

func TestDefaults(t *testing.T) {
	s, err := Load("")
	require.NoError(t, err)
	require.Equal(t,
		Policy{Unknown: "load_check", PreferRecompilation: "serve_and_refresh",
			Unsupported: "recompile", MeasureGain: true}, s.Policies[""])
	require.Equal(t, Rebuild{Enabled: true}, s.Rebuild)
	require.Equal(t, "reference", s.KeepSource)
	for _, f := range s.Fields() {
		require.Equal(t, fromDefault, f.Origin, f.Name)
	}
}

func TestPoliciesInherit(t *testing.T) {
	s, _, err := load(t, `
[policy.OpenVINOExecutionProvider]
unknown = "refuse"
measure_gain = false

[policy]
max_age = "90d"
unsupported = "fail"
`)
	require.NoError(t, err)
	one := s.Policies["OpenVINOExecutionProvider"]
	require.Equal(t,
		Policy{Unknown: "refuse", PreferRecompilation: "serve_and_refresh", Unsupported: "fail",
			MaxAge: "90d"}, one)
	require.Equal(t, "load_check", s.Policies[""].Unknown)
}

func TestOrigins(t *testing.T) {
	s, file, err := load(t, "jobs = 2\n[policy]\nmax_age = "+
		"\"1d\"\n[policy.QNNExecutionProvider]\nunknown = \"serve\"\n[[runtime]]\ndirectory = "+
		"\"rt\"\n")
	require.NoError(t, err)
	s.Flag("state", "state")
	s.PreferRuntimes([]Runtime{{Directory: "/flagged"}}, "runtime")
	have := map[string]Field{}
	for _, f := range s.Fields() {
		have[f.Name] = f
	}
	origin := func(name string) string { return have[name].Origin }
	require.Equal(t, file+":1", origin("jobs"))
	require.Equal(t, "flag --state", origin("state"))
	require.Equal(t, "default", origin("socket"))
	require.Equal(t, file+":5", origin("policy.QNNExecutionProvider.unknown"))
	require.Equal(t, "policy.max_age", origin("policy.QNNExecutionProvider.max_age"))
	require.Equal(t, "1d", have["policy.QNNExecutionProvider.max_age"].Value)
	require.Equal(t, "flag --runtime", origin("runtime[1].directory"))
	require.Equal(t, file+":7", origin("runtime[2].directory"))
	require.Equal(t, filepath.Join(filepath.Dir(file), "rt"), have["runtime[2].directory"].Value,
		"relative to this file")
}

const everything = `
state = "/s"
socket = "/k"
log_level = "warn"
worker = "/w"
worker_user = "epcached-worker:990"
jobs = 3
jobs_memory_bytes = 12
path_access = true
administrators = [1, 2]
allow_options = ["QNNExecutionProvider/x", "session/y"]
rules = ["/r", "/r2"]
keep_source = "copy"
publishers = [6]
autostart = false
idle_exit = "1h"
[limits]
wall = "1.5s"
memory_bytes = 9223372036854775807
output_bytes = 6
[sandbox]
network = true
read = ["/l", "/licence"]
write = ["/dev/x"]
[[runtime]]
directory = "/o \"dd\" \u0001"
[[runtime]]
ort_library = "/ort.so"
[runtime.ep_libraries]
QNNExecutionProvider = "/q.so"
"My.ExecutionProvider" = "/m.so"
[[driver]]
ep = "QNNExecutionProvider"
command = ["/bin/sh", "-c", "echo 1"]
[[driver]]
file = "/sys/v"
[[compiler]]
ep = "QNNExecutionProvider"
command = ["/opt/qnn/compile", "{model}", "-o", "{output}", "--soc={option:soc_model}"]
version = ["--version"]
files = ["/opt/qnn/lib.so"]
read = ["/opt/qnn/data"]
device = "CPU"
without_library = true
[policy]
unknown = "serve"
prefer_recompilation = "refuse"
max_age = "1d12h"
measure_gain = false
[policy.QNNExecutionProvider]
unsupported = "fail"
[rebuild]
enabled = false
window = "22:00-06:00"
[space]
pack = "always"
pack_after = "5d"
`

// The printed configuration reads back as the same settings, and is complete.
func TestPrintReadsBack(t *testing.T) {
	s, _, err := load(t, everything)
	require.NoError(t, err)
	var text bytes.Buffer
	require.NoError(t, s.Print(&text))
	again, file, err := load(t, text.String())
	require.NoError(t, err, text.String())
	require.Equal(t, "/o \"dd\" \u0001", again.Runtimes[0].Directory)
	require.Equal(t,
		map[string]string{"QNNExecutionProvider": "/q.so", "My.ExecutionProvider": "/m.so"},
		again.Runtimes[1].EPLibraries)
	s.File, s.fields, again.fields = file, nil, nil
	require.Equal(t, s, again)
}

// A field that an earlier version had is accepted, whatever its value is, with a warning that says
// what it meant.
func TestARemovedFieldIsAWarning(t *testing.T) {
	for _, value := range []string{`"7d"`, `""`, "3"} {
		s, file, err := load(t, "jobs = 3\n[space]\n compress_after = "+value+"\npack = \"off\"\n")
		require.NoError(t, err)
		require.Equal(t, "off", s.Space.Pack)
		require.Len(t, s.Warnings(), 1)
		says := s.Warnings()[0].Error()
		require.True(t,
			strings.HasPrefix(says,
				file+`:3:2: field "space.compress_after": it no longer has an effect: `),
			says)
		var text bytes.Buffer
		require.NoError(t, s.Print(&text))
		require.Contains(t, text.String(), "# warning: "+says+"\n")
		again, _, err := load(t, text.String())
		require.NoError(t, err)
		require.Empty(t, again.Warnings())
	}
	s, _, err := load(t, everyRemovedField)
	require.NoError(t, err)
	require.Len(t, s.Warnings(), strings.Count(everyRemovedField, " = ")-5, "[claims] and "+
		"[failures] have one each, and url, trust and ep are none")
	require.Equal(t, "7.5s", s.Limits.Wall)
	require.Equal(t, []Driver{{EP: "QNNExecutionProvider", File: "/sys/module/qcom/version"}},
		s.Drivers)
	require.True(t, strings.HasSuffix(s.Warnings()[2].Error(), `epcached.toml:4:1: field `+
		`"limits.wall_seconds": it has another name now: write wall = "7.5s"`), s.Warnings()[2])
	s, _, err = load(t, "standby_seconds = 30.0\nreport_quorum = 2\ntrusted_reporters = [7]\n")
	require.NoError(t, err)
	require.Len(t, s.Warnings(), 3)
	for _, w := range s.Warnings()[1:] {
		require.ErrorContains(t, w, "a report leads to a load of the build")
		require.ErrorContains(t, w, "use epcachectl invalidate")
	}
	_, _, err = load(t, "compress_after = \"7d\"\n")
	require.ErrorContains(t, err, "unknown field")
}

// everyRemovedField has what the last version had, and this one has not.
const everyRemovedField = `quiet_seconds = 0.5
poll_seconds = 7
[limits]
wall_seconds = 7.5
cpu_seconds = 2.5
verify_seconds = 3
output_files = 7
open_files = 8
processes = 9
stack_bytes = 10
nice = 11
[sandbox]
namespaces = false
[claims]
deadline_seconds = 60.5
open = 14
[policy]
min_compile_seconds = 0.25
[policy.QNNExecutionProvider]
min_compile_seconds = 0.25
[rebuild]
jobs = 2
cpu_share = 0.25
[failures]
remember = false
longest = "3d"
[space]
max_entries = 3
user_bytes = "1GiB"
unpacked_dir = "/dev/shm"
[[driver]]
ep = "QNNExecutionProvider"
module = "qcom"
[remote.team]
url = "file:///r"
trust = ["/k.pub"]
connect = "5s"
lose_at_most = "1m"
`

// maxKeys bounds the fields of a configuration, each of which is documented, tested and kept.
const maxKeys = 60

func TestConfigurationHasFewFields(t *testing.T) {
	n := countKeys(reflect.TypeFor[Settings]())
	t.Logf("%d fields", n)
	require.LessOrEqual(t, n, maxKeys)
}

// countKeys counts the fields that a file may have, those of tables once.
func countKeys(of reflect.Type) (n int) {
	for of.Kind() == reflect.Slice || of.Kind() == reflect.Map {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct {
		return 1
	}
	for _, f := range reflect.VisibleFields(of) {
		if f.Tag.Get("toml") != "" {
			n += countKeys(f.Type)
		}
	}
	return n
}

// One signature counts. A file that demanded two is not read as if it demanded one.
func TestSeveralSignaturesAreRefused(t *testing.T) {
	const table = "[remote.team]\nurl = \"file:///r\"\ntrust = [\"/k.pub\"]\n"
	for _, before := range []string{"", table} {
		s, _, err := load(t, before+"threshold = 1\n")
		require.NoError(t, err)
		require.Len(t, s.Warnings(), 1)
		require.ErrorContains(t, s.Warnings()[0], "limit what a key may sign with the lines EPs")
		_, file, err := load(t, before+"threshold = 2\n")
		require.ErrorContains(t, err, fmt.Sprintf("%s:%d:1: field ", file,
			strings.Count(before, "\n")+1))
		require.ErrorContains(t, err, "2 signatures are not supported any more: one signature")
	}
}

func TestPrintSaysWhereFrom(t *testing.T) {
	s, file, err := load(t, "jobs = 3\n")
	require.NoError(t, err)
	var text bytes.Buffer
	require.NoError(t, s.Print(&text))
	require.Contains(t, text.String(), "jobs = 3  # "+file+":1\n")
	require.Contains(t, text.String(), "\n[policy]\nunknown = \"load_check\"  # default\n")
	require.Contains(t, text.String(), "# max_age = \"\"  # default: no limit\n")
}

func TestParseDuration(t *testing.T) {
	cases := map[string]time.Duration{
		"90d": 90 * 24 * time.Hour, "1d12h": 36 * time.Hour, "0.5d": 12 * time.Hour,
		"2h30m": 150 * time.Minute, "0s": 0, "0d": 0,
	}
	for text, want := range cases {
		got, err := ParseDuration(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{"", "d", "5", "1w", "-1h", "1h1d", "1d-2h", "999999999999d",
		"1.d"} {
		_, err := ParseDuration(text)
		require.Error(t, err, text)
	}
}

// Any file is refused, or reads back as the same settings.
func FuzzLoad(f *testing.F) {
	f.Add(everything)
	f.Add("[[a.b]]\nc = {d = [{e = 1}, 2]}\n")
	f.Add("[policy.\"\"]\n")
	f.Fuzz(func(t *testing.T, text string) {
		d, err := tomlfile.Parse("f", []byte(text))
		if err != nil {
			return
		}
		s := Defaults()
		s.decode(d)
		if err := d.Err(); err != nil {
			require.NotEmpty(t, err.Error())
			return
		}
		var printed bytes.Buffer
		require.NoError(t, s.Print(&printed))
		d, err = tomlfile.Parse("f", printed.Bytes())
		require.NoError(t, err, printed.String())
		again := Defaults()
		again.decode(d)
		require.NoError(t, d.Err(), printed.String())
		s.fields, again.fields, s.warnings = nil, nil, nil
		require.Equal(t, s, again)
	})
}

// The sample is what users start from: with its comments taken off it must be read, and where it
// shows defaults they must be.
func TestSampleFile(t *testing.T) {
	text, err := os.ReadFile("../../systemd/epcached.toml")
	require.NoError(t, err)
	var plain []string
	field := regexp.MustCompile(`^# ((\[+[A-Za-z.]+\]+|[a-z_]+ = .*)( *#.*)?)$`)
	example := false
	for _, line := range strings.Split(string(text), "\n") {
		m := field.FindStringSubmatch(line)
		if m != nil && !example {
			plain = append(plain, m[1])
		}
		if m == nil {
			example = strings.HasSuffix(line, "Example:")
		}
	}
	require.Greater(t, len(plain), 20)
	s, _, err := load(t, strings.Join(plain, "\n"))
	require.NoError(t, err)
	d, err := Load("")
	require.NoError(t, err)
	require.Equal(t, d.Policies[""], s.Policies["OpenVINOExecutionProvider"])
	delete(s.Policies, "OpenVINOExecutionProvider")
	said := map[string]bool{}
	for _, f := range s.fields {
		said[tomlfile.Spell(f.path)] = f.origin != fromDefault
	}
	for _, f := range d.fields {
		if name := tomlfile.Spell(f.path); name != "state" && name != "socket" &&
			name != "worker" && name != "rules" && name != "administrators" &&
			name != "signing_key" {
			require.True(t, said[name], "%s is not in the sample", name)
		}
	}
	s.File, s.fields, d.fields = "", nil, nil
	for _, lists := range []*Settings{s, d} {
		// empty, and not there at all
		lists.AllowOptions, lists.Publishers, lists.Trust = nil, nil, nil
		lists.Sandbox.Read, lists.Sandbox.Write = nil, nil
	}
	require.Equal(t, d, s)
}

// The document names every field.
func TestDocumentNamesEveryField(t *testing.T) {
	text, err := os.ReadFile("../../doc/configuration.md")
	require.NoError(t, err)
	s, _, err := load(t, everything)
	require.NoError(t, err)
	for _, f := range s.fields {
		name := f.path[len(f.path)-1]
		if !strings.HasSuffix(name, "ExecutionProvider") {
			require.Contains(t, string(text), "`"+name+"`")
		}
	}
}

func TestLayersAreTrustedByOwnerOrKeys(t *testing.T) {
	dir := t.TempDir()
	load := func(text string) (*Settings, error) {
		file := filepath.Join(dir, "epcached.toml")
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		return Load(file)
	}
	s, err := load("[[layer]]\npath = \"/a\"\n[[layer]]\npath = \"b\"\ntrust = \"owner\"\n" +
		"[[layer]]\npath = \"/c\"\ntrust = \"ci.pub\"\n[[layer]]\npath = \"/d\"\ntrust = " +
		"[\"/x.pub\", \"y.pub\"]\n")
	require.NoError(t, err)
	require.Equal(t, []Layer{{Path: "/a"}, {Path: filepath.Join(dir, "b")},
		{"/c", LayerTrust{filepath.Join(dir, "ci.pub")}},
		{"/d", LayerTrust{"/x.pub", filepath.Join(dir, "y.pub")}}}, s.Layers)
	for text, want := range map[string]string{
		"[[layer]]\ntrust = \"owner\"\n":             "no layer named",
		"[[layer]]\npath = \"/a\"\ntrust = []\n":     "must be \"owner\", or files",
		"[[layer]]\npath = \"/a\"\ntrust = 1\n":      "must be \"owner\", or files",
		"[[layer]]\npath = \"/a\"\npermanent = true": "unknown field",
	} {
		_, err := load(text)
		require.ErrorContains(t, err, want, text)
	}
}

// A remote without a trusted key, with a wrong URL or a misspelled field is refused with its place.
func TestRemotesAreChecked(t *testing.T) {
	for text, want := range map[string]string{
		"[remote.a]\nurl = \"file:///x\"\n":                      "no key is trusted",
		"[remote.a]\ntrust = [\"k\"]\n":                          "no url given",
		"[remote.a]\nurl = \"ftp://x\"\ntrust = [\"k\"]\n":       "not of s3://",
		"[remote.a]\nurl = \"https://u:p@x\"\ntrust = [\"k\"]\n": "credentials",
		"[remote.a]\nurl = \"file:///x\"\ntrust=[\"k\"]\n" +
			"publish = \"all\"\n": "one of never, shared",
		"[remote.a]\nurl = \"file:///x\"\ntrust = [\"k\"]\nlosses = 3\n": "unknown field",
		"[remote.\"a b\"]\nurl = \"file:///x\"\ntrust = [\"k\"]\n":       "name",
	} {
		_, _, err := load(t, text)
		require.ErrorContains(t, err, want, text)
	}
	s, _, err := load(t, "[remote.a]\nurl = \"file:///x\"\nask = \"never\"\npublish = \"shared\"\n")
	require.NoError(t, err)
	require.True(t, s.Remotes["a"].Lease)
}

func TestFilesOfKeysAreRegular(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	for text, field := range map[string]string{
		"trust = [%q]\n":                                  `"trust[1]"`,
		"signing_key = %q\n":                              `"signing_key"`,
		"[[layer]]\npath = \"/a\"\ntrust = %q\n":          `"layer[1].trust"`,
		"[remote.a]\nurl = \"file:///a\"\ntrust = [%q]\n": `"remote.a.trust[1]"`,
	} {
		for _, file := range []string{fifo, "/dev/zero"} {
			_, at, err := load(t, fmt.Sprintf(text, file))
			require.ErrorContains(t, err, at, text)
			require.ErrorContains(t, err, field, text)
			require.ErrorContains(t, err, fmt.Sprintf("%q is not a regular file", file), text)
		}
		_, _, err := load(t, fmt.Sprintf(text, "of a disk that is not mounted.pub"))
		require.NoError(t, err, text)
	}
}
