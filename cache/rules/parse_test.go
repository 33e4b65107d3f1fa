package rules

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"

	"github.com/epcached/epcached/internal/tomlfile"
)

// good is a whole rule; cases change one line of it.
const good = `[[ep.X.rule]]
name = "n"
when.sdk_version = "same"
verdict = "optimal"
reason = "r"
`

const goodReport = `[[ep.X.report]]
name = "n"
code = 10
class = "stale"
reason = "r"
`

func TestMalformedFilesAreRefusedWithLineAndReason(t *testing.T) {
	change := func(text, old, new string) string {
		require.Contains(t, text, old)
		return strings.Replace(text, old, new, 1)
	}
	rule := func(old, new string) string { return change(good, old, new) }
	report := func(old, new string) string { return change(goodReport, old, new) }
	when := func(value string) string { return rule(`"same"`, value) }
	for name, c := range map[string]struct{ text, want string }{
		"no TOML":     {"[ep.X\n", "f.toml:1:6: "},
		"a key twice": {rule("reason", "name = \"m\"\nreason"), "f.toml:5:1: "},
		"unknown table": {"[eps.X]\n",
			"f.toml:1:2: unknown field \"eps\"; the fields are ep"},
		"unknown part": {"[[ep.X.rules]]\n",
			"f.toml:1:8: unknown field \"ep.X.rules\"; did you mean \"rule\"?"},
		"unknown field": {rule("reason", "because = \"r\"\nreason"),
			"f.toml:5:1: unknown field \"ep.X.rule[1].because\"; the fields are name, reason, " +
				"verdict, when"},
		"no array of tables": {"ep.X.rule = 1\n", "f.toml:1:6: field \"ep.X.rule\": it is " +
			"a whole number and must be an array in brackets"},
		"an array of others": {"ep.X.rule = [1]\n",
			"f.toml:1:14: field \"ep.X.rule[1]\": it is a whole number and must be a table"},
		"no table": {"ep = 1\n",
			"f.toml:1:1: field \"ep\": it is a whole number and must be a table"},
		"replace is no truth": {"ep.X.replace = 'yes'\n",
			"f.toml:1:6: field \"ep.X.replace\": it is a text and must be true or false"},
		"name of an EP": {"[ep.\"a\\nb\"]\n",
			`f.toml:1:5: field "ep.\"a\\nb\"": not the name of an EP`},
		"no name": {rule(`name = "n"`, ""),
			"f.toml:1:8: field \"ep.X.rule[1]\": name is missing"},
		"empty name": {rule(`"n"`, `""`),
			"f.toml:2:1: field \"ep.X.rule[1].name\": empty"},
		"a name twice": {good + good,
			`f.toml:7:1: field "ep.X.rule[2].name": another rule has the name "n"`},
		"name of two lines": {rule(`"n"`, `"a\nb"`),
			"f.toml:2:1: field \"ep.X.rule[1].name\": at most 100 printable"},
		"name is a number": {rule(`"n"`, `7`), "f.toml:2:1: field \"ep.X.rule[1].name\": " +
			"it is a whole number and must be a text in quotes"},
		"unknown verdict": {rule("optimal", "good"),
			`f.toml:4:1: field "ep.X.rule[1].verdict": unknown verdict "good": ` +
				`the verdicts are unknown, optimal, prefer_recompilation, unsupported`},
		"no verdict": {rule(`verdict = "optimal"`, ""),
			"f.toml:1:8: field \"ep.X.rule[1]\": verdict is missing"},
		"no reason": {rule(`reason = "r"`, ""),
			"f.toml:1:8: field \"ep.X.rule[1]\": reason is missing"},
		"unknown placeholder": {rule(`"r"`, `"{build.sdk}"`),
			"f.toml:5:1: field \"ep.X.rule[1].reason\": unknown placeholder {build.sdk}"},
		"a brace": {rule(`"r"`, `"a { b"`),
			"f.toml:5:1: field \"ep.X.rule[1].reason\": a brace without a placeholder"},
		"a long reason": {rule(`"r"`, `"`+strings.Repeat("r", maxString+1)+`"`),
			"f.toml:5:1: field \"ep.X.rule[1].reason\": longer than 2000 bytes"},
		"unknown fact": {rule("sdk_version", "sdk"), "f.toml:3:6: field " +
			"\"ep.X.rule[1].when.sdk\": unknown fact: the facts are compatibility_string, "},
		"fact of another EP": {"[[ep.Y.extract]]\nas = 'y'\n" + rule("sdk_version", "y"),
			"f.toml:5:6: field \"ep.X.rule[1].when.y\": unknown fact"},
		"empty expression": {when(`""`),
			"f.toml:3:6: field \"ep.X.rule[1].when.sdk_version\": empty"},
		"blank expression": {when(`" "`),
			"f.toml:3:6: field \"ep.X.rule[1].when.sdk_version\": empty"},
		"not understood": {when(`"equal"`),
			`f.toml:3:6: field "ep.X.rule[1].when.sdk_version": "equal" is not understood`},
		"turned round": {when(`"runtime >= build"`),
			`f.toml:3:6: field "ep.X.rule[1].when.sdk_version": "build" is not a version`},
		"unknown operator": {when(`"build =< runtime"`),
			`f.toml:3:6: field "ep.X.rule[1].when.sdk_version": ` +
				`"build =< runtime" is not understood`},
		"no version": {when(`"build >= new"`),
			`f.toml:3:6: field "ep.X.rule[1].when.sdk_version": "new" is not a version`},
		"no version behind": {when(`"build >= 1,"`),
			`f.toml:3:6: field "ep.X.rule[1].when.sdk_version": "build >= 1," is not understood`},
		"unknown part of versions": {when(`"same minor"`),
			`f.toml:3:6: field "ep.X.rule[1].when.sdk_version": "same minor" is not understood`},
		"second of several": {when(`["same", "x"]`),
			`f.toml:3:29: field "ep.X.rule[1].when.sdk_version[2]": "x" is not understood`},
		"no conditions": {when(`[]`),
			"f.toml:3:6: field \"ep.X.rule[1].when.sdk_version\": empty"},
		"a number": {when(`2.1`), "f.toml:3:6: field " +
			"\"ep.X.rule[1].when.sdk_version\": it is a number and must be a text in quotes: " +
			"write sdk_version = \"2.1\""},
		"a date": {when(`2026-11-21`), "f.toml:3:6: field " +
			"\"ep.X.rule[1].when.sdk_version\": it is a time and must be a text in quotes"},
		"unknown set": {when(`{ any = ["a"] }`),
			"f.toml:3:22: unknown field \"ep.X.rule[1].when.sdk_version.any\"; the fields are " +
				"build, "},
		"empty set": {when(`{}`),
			"f.toml:3:6: field \"ep.X.rule[1].when.sdk_version\": empty"},
		"set of nothing": {when(`{ build = [] }`),
			"f.toml:3:22: field \"ep.X.rule[1].when.sdk_version.build\": empty"},
		"group that is none": {when(`{ equivalent = ["a", "b"] }`), "f.toml:3:36: field " +
			"\"ep.X.rule[1].when.sdk_version.equivalent[1]\": it is a text and must be an array " +
			"in brackets"},
		"cover that is none": {when(`{ covers = ["a"] }`), "f.toml:3:22: field " +
			"\"ep.X.rule[1].when.sdk_version.covers\": it is an array and must be a table"},
		"pattern": {when(`{ build_matches = '(' }`), "f.toml:3:22: field " +
			"\"ep.X.rule[1].when.sdk_version.build_matches\": regular expression: error parsing " +
			"regexp: missing closing )"},
		"long pattern": {when(`{ build_matches = '` + strings.Repeat("a", maxPattern+1) +
			`' }`), "f.toml:3:22: field \"ep.X.rule[1].when.sdk_version.build_matches\": a " +
			"regular expression of more than 500 bytes"},
		"large pattern": {when(`{ build_matches = '(\pL{100}){10}' }`),
			"f.toml:3:22: field \"ep.X.rule[1].when.sdk_version.build_matches\": a regular " +
				"expression that repeats too much"},
		"look-behind": {when(`{ build_matches = '(?<!a)b' }`),
			"f.toml:3:22: field \"ep.X.rule[1].when.sdk_version.build_matches\": regular " +
				"expression: "},
		"extract of nothing": {"[[ep.X.extract]]\n", "f.toml:1:8: field " +
			"\"ep.X.extract[1]\": give either regexp, with named groups, or as"},
		"extract twice": {"[[ep.X.extract]]\nregexp = '(?P<a>.)'\nas = 'a'\n",
			"f.toml:1:8: field \"ep.X.extract[1]\": give either regexp"},
		"extract without a group": {"[[ep.X.extract]]\nregexp = '(.)'\n",
			"f.toml:2:1: field \"ep.X.extract[1].regexp\": no named group"},
		"extract of another": {"[[ep.X.extract]]\nfrom = 'a'\nas = 'b'\n",
			`f.toml:2:1: field "ep.X.extract[1].from": unknown fact "a"`},
		"extract that is there": {"[[ep.X.extract]]\nas = 'sdk_version'\n",
			`f.toml:1:8: field "ep.X.extract[1]": the fact "sdk_version" exists already`},
		"name of a fact": {"[[ep.X.extract]]\nregexp = '(?P<SDK>.)'\n",
			`f.toml:1:8: field "ep.X.extract[1]": "SDK" is not a name for a fact`},
		"code is no code": {report("10", "-2"),
			"f.toml:3:1: field \"ep.X.report[1].code\": -2 is not an error code"},
		"code without a name": {report("10", `"STALE"`),
			`f.toml:3:1: field "ep.X.report[1].code": unknown error code "STALE": ` +
				`the codes are OK, FAIL, `},
		"code is a truth": {report("10", "[10, true]"), "f.toml:3:13: field " +
			"\"ep.X.report[1].code[2]\": true or false, where an error code is required"},
		"unknown class": {report("stale", "fresh"),
			`f.toml:4:1: field "ep.X.report[1].class": "fresh": it must be one of stale, ` +
				`not stale, unclear`},
		"report's placeholder": {report(`"r"`, `"{build.sdk_version}"`), "f.toml:5:1: field " +
			"\"ep.X.report[1].reason\": unknown placeholder {build.sdk_version}: the " +
			"placeholders are code, ep"},
		"too deep": {when(strings.Repeat("[", 20) + strings.Repeat("]", 20)),
			"f.toml:3:6: nested more than 16 deep"},
		"very deep":       {"a = " + strings.Repeat("[", tomlfile.MaxSize/2), "f.toml:1:"},
		"too many values": {"a = [" + strings.Repeat("1,", 20001) + "]", "f.toml:1:40"},
		"too many rules": {strings.Repeat("[[ep.X.report]]\n", maxRules+1),
			"f.toml: and 2954 more mistakes"},
	} {
		t.Run(name, func(t *testing.T) {
			set, err := Parse("f.toml", []byte(c.text))
			require.ErrorContains(t, err, c.want)
			require.Nil(t, set)
			var wrong *tomlfile.Error
			require.ErrorAs(t, err, &wrong)
			require.Equal(t, "f.toml", wrong.File)
			require.NotEmpty(t, wrong.Text)
		})
	}
}

func TestLargeFilesAreRefused(t *testing.T) {
	_, err := Parse("f.toml", []byte(strings.Repeat("#", tomlfile.MaxSize+1)))
	require.EqualError(t, err, "f.toml: larger than 1048576 bytes")
}

func TestAllMistakesAreTold(t *testing.T) {
	_, err := Parse("f.toml", []byte(`
[[ep.X.rule]]
name = "n"
verdict = "good"
reason = "{sdk}"

[[ep.Y.report]]
name = "n"
class = "old"
reason = "r"
`))
	for _, line := range []string{"f.toml:4:1: field \"ep.X.rule[1].verdict\"",
		"f.toml:5:1: field \"ep.X.rule[1].reason\"", "f.toml:9:1: field \"ep.Y.report[1].class\""} {
		require.ErrorContains(t, err, line)
	}
	require.Len(t, strings.Split(err.Error(), "\n"), 3)
}

func TestTooManyRules(t *testing.T) {
	var text strings.Builder
	for i := range maxRules + 1 {
		fmt.Fprintf(&text, "[[ep.X.report]]\nname = \"%d\"\nclass = \"stale\"\nreason = \"r\"\n", i)
	}
	_, err := Parse("f.toml", []byte(text.String()))
	require.EqualError(t, err, "f.toml: more than 1000 rules and reports")
}

func TestTheSameTableSpelledInAnotherWay(t *testing.T) {
	set, err := Parse("f.toml",
		[]byte(
			`ep = { X = { rule = [ { name = "n", when = { sdk_version = [ "same" ] }, `+
				`verdict = "optimal", reason = "r" } ] } }`))
	require.NoError(t, err)
	require.Equal(t, compilers.Optimal,
		set.Judge(Facts{EP: "X", SDKVersion: "1"}, Facts{EP: "X", SDKVersion: "1"}).Verdict)

	_, err = Parse("f.toml", []byte("[[ep.X.rule]]\nname = 'n'\nverdict = 'optimal'\nreason = "+
		"'r'\n[ep.X.rule.when]\nsdk_version = 'x'\n"))
	require.ErrorContains(t, err, "f.toml:6:1: field \"ep.X.rule[1].when.sdk_version\": ")
}

// directory writes files and gives their directory.
func directory(t *testing.T, files map[string]string) string {
	dir := t.TempDir()
	for name, text := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	return dir
}

func TestLoadReadsFilesAndDirectoriesInOrder(t *testing.T) {
	rule := func(name string) string { return strings.Replace(good, `"n"`, `"`+name+`"`, 1) }
	dir := directory(t,
		map[string]string{"20-b.toml": rule("b"), "10-a.toml": rule("a"), "notes.txt": "not TOML",
			".30-c.toml": "being edited"})
	alone := filepath.Join(directory(t, map[string]string{"alone.rules": rule("alone")}),
		"alone.rules")
	facts := Facts{EP: "X", SDKVersion: "1"}

	set, err := Load(dir)
	require.NoError(t, err)
	j := set.Judge(facts, facts)
	require.Equal(t, "a", j.Rule)
	require.Equal(t, filepath.Join(dir, "10-a.toml"), j.File)

	set, err = Load(alone, dir)
	require.NoError(t, err)
	require.Equal(t, "alone", set.Judge(facts, facts).Rule)

	set, err = Load()
	require.NoError(t, err)
	require.Empty(t, set.EPs())
}

func TestLoadTellsOfEveryFile(t *testing.T) {
	dir := directory(t,
		map[string]string{"a.toml": "x = 1\n", "b.toml": good, "c.toml": "[ep.X]\nreplace = 1\n"})
	set, err := Load(dir)
	require.Nil(t, set)
	require.ErrorContains(t, err, "a.toml:1:1: unknown field \"x\"; the fields are ep")
	require.ErrorContains(t, err, "c.toml:2:1: field \"ep.X.replace\": ")
	var wrong *tomlfile.Error
	require.ErrorAs(t, err, &wrong)
	require.Equal(t, filepath.Join(dir, "a.toml"), wrong.File)

	_, err = Load(filepath.Join(dir, "absent.toml"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestLoadOpensOnlyFiles(t *testing.T) {
	_, err := Load(os.DevNull)
	require.ErrorContains(t, err, "not a regular file")
}

func TestLoadMergesFilesOfOneEP(t *testing.T) {
	dir := directory(t, map[string]string{
		"a.toml": "[ep.QNNExecutionProvider]\nreplace = true\n",
		"b.toml": strings.Replace(good, "ep.X", "ep.QNNExecutionProvider", 1),
	})
	set, err := Load(dir)
	require.NoError(t, err)
	set = set.Overriding(Shipped())
	require.Equal(t, "n", set.Judge(qnn270, qnn270).Rule)
	require.Empty(t, set.Judge(qnn250, qnn270).Rule, "replaced in one file is replaced")
}

func TestLoadBoundsAllFilesTogether(t *testing.T) {
	many := func(ep string) string {
		var text strings.Builder
		for i := range maxRules/2 + 1 {
			fmt.Fprintf(&text,
				"[[ep.%s.report]]\nname = \"%d\"\nclass = \"stale\"\nreason = \"r\"\n", ep, i)
		}
		return text.String()
	}
	_, err := Load(directory(t, map[string]string{"a.toml": many("A"), "b.toml": many("B")}))
	require.EqualError(t, err, "rules: more than 1000 rules and reports in 2 files")
}

func TestOver(t *testing.T) {
	parse := func(text string) *Set {
		set, err := Parse("f.toml", []byte(text))
		require.NoError(t, err)
		return set
	}
	const ep = "OpenVINOExecutionProvider"
	judge := func(s *Set) string { return s.Judge(openVINO180, openVINO181).Rule }
	class := func(s *Set) string { return s.Classify(ep, 10, "").Rule }

	first := parse("[[ep." + ep + ".rule]]\nname = \"trusted pair\"\nwhen.ep_version = \"build " +
		"<= runtime\"\nverdict = \"optimal\"\nreason = \"r\"\n").Overriding(Shipped())
	require.Equal(t, "trusted pair", judge(first))
	require.Equal(t, "another release", first.Judge(openVINO181, openVINO140).Rule,
		"what no rule of the administrator's decides is decided by the shipped ones")
	require.Equal(t, "blob refused", class(first))
	require.Equal(t, "newer loads older", first.Judge(qnn250, qnn270).Rule)

	replaced := parse("[ep." + ep + "]\nreplace = true\n").Overriding(Shipped())
	require.Empty(t, judge(replaced))
	require.Equal(t, "invalid graph", class(replaced), "what is said of all EPs still counts")
	require.Empty(t, parse("[ep.\"*\"]\nreplace = true\n").Overriding(replaced).
		Classify(ep, 10, "").Rule)
	require.Empty(t, judge(parse("").Overriding(replaced)), "replaced stays replaced")

	require.Equal(t, "1.8.0 and 1.8.1", judge(Shipped()), "no set was changed")
	require.Equal(t, "1.8.0 and 1.8.1", judge((*Set)(nil).Overriding(Shipped())))
	require.Equal(t, "1.8.0 and 1.8.1", judge(Shipped().Overriding(nil)))
}

func FuzzParse(f *testing.F) {
	entries, err := shippedFiles.ReadDir("shipped")
	require.NoError(f, err)
	for _, e := range entries {
		text, err := shippedFiles.ReadFile("shipped/" + e.Name())
		require.NoError(f, err)
		f.Add(text)
	}
	f.Add([]byte(good))
	f.Add([]byte(goodReport))
	f.Add(
		[]byte(
			`ep.X.rule = [ { when.sdk_version = { covers."80+" = ["a"], equivalent = [["a"]], ` +
				`build_matches = '(a{9}){9}' } } ]`))
	f.Fuzz(func(t *testing.T, text []byte) {
		set, err := Parse("f.toml", text)
		if (set == nil) == (err == nil) {
			t.Fatalf("set %v, error %v", set, err)
		}
		var wrong *tomlfile.Error
		if err != nil && (!errors.As(err, &wrong) || wrong.Line < 0 || wrong.Text == "") {
			t.Fatalf("error without file, line and reason: %v", err)
		}
		for _, ep := range set.EPs() {
			build, runtime := qnn250, openVINO181
			build.EP, runtime.EP = ep, ep
			if j := set.Judge(build, runtime); j.Reason == "" && j.Rule == "" {
				t.Fatal("a judgement without a reason")
			}
			if c := set.Classify(ep, 10, "text"); c.Name == "" {
				t.Fatal("no class")
			}
		}
	})
}
