package rules

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers"
)

func TestConditions(t *testing.T) {
	for _, c := range []struct {
		name, when     string // of the fact sdk_version
		build, runtime string
		holds          bool
	}{
		{"same", `"same"`, "a", "a", true},
		{"same, differs", `"same"`, "1.8", "1.8.0", false},
		{"same, both unknown", `"same"`, "", "", false},
		{"different", `"different"`, "a", "b", true},
		{"different, same", `"different"`, "a", "a", false},
		{"different, one unknown", `"different"`, "a", "", false},
		{"same major.minor", `"same major.minor"`, "2026.4.0", "v2026.4.1", true},
		{"same major.minor, differs", `"same major.minor"`, "2026.3", "2026.4", false},
		{"same major", `"same major"`, "2.1", "2", true},
		{"same major.minor.patch", `"same major.minor.patch"`, "2.1.3.4", "2.1.3.5", true},
		{"same major, no version", `"same major"`, "x", "x", false},
		{"different major", `"different major"`, "1.9", "2.0", true},
		{"different major, same", `"different major"`, "1.9", "1.0", false},
		{"different major, no version", `"different major"`, "x", "2.0", false},
		{"newer loads older", `"build <= runtime"`, "2.49.40", "2.51.0", true},
		{"newer loads older, equal", `"build <= runtime"`, "2.51", "2.51.0", true},
		{"newer loads older, newer", `"build <= runtime"`, "2.52", "2.51.0", false},
		{"equal", `"build == runtime"`, "1.8+x", "1.8.0+y", true},
		{"not equal", `"build != runtime"`, "1.8", "1.8.0", false},
		{"not comparable, not equal", `"build != runtime"`, "1.8-a", "1.8-b", false},
		{"greater", `"build > runtime"`, "1.9", "1.8", true},
		{"less", `"build < runtime"`, "1.9", "1.10", true},
		{"at least", `"build >= runtime"`, "1.9", "1.9", true},
		{"minimum", `"runtime >= 535.104"`, "", "535.104.05", true},
		{"minimum, older", `"runtime >= 535.104"`, "", "470.1", false},
		{"minimum, unknown", `"runtime >= 535.104"`, "600", "", false},
		{"range", `"build >= 1.8.0, < 1.9"`, "1.8.7", "", true},
		{"range, above", `"build >= 1.8.0, < 1.9"`, "1.9.0", "", false},
		{"several", `["same major", "build <= runtime"]`, "2.1", "2.2", true},
		{"several, one fails", `["same major", "build <= runtime"]`, "2.3", "2.2", false},
		{"known", `"build known"`, "x", "", true},
		{"known, is not", `"runtime known"`, "x", "", false},
		{"both known", `"both known"`, "x", "y", true},
		{"both known, one is not", `"both known"`, "x", "", false},
		{"unknown", `"build unknown"`, "", "x", true},
		{"both unknown, one is known", `"both unknown"`, "", "x", false},
		{"expression and set", `["different", { build = ["a"] }]`, "a", "b", true},
		{"expression and set, set fails", `["different", { build = ["a"] }]`, "b", "c", false},
		{"one of", `{ build = ["a", "b"] }`, "b", "", true},
		{"one of, is not", `{ build = ["a", "b"], runtime = ["c"] }`, "b", "d", false},
		{"equivalent", `{ equivalent = [["a", "b"], ["c", "d"]] }`, "d", "c", true},
		{"equivalent, equal", `{ equivalent = [["a", "b"]] }`, "x", "x", true},
		{"equivalent, in two groups", `{ equivalent = [["a", "b"], ["c", "d"]] }`, "a", "c", false},
		{"equivalent, both unknown", `{ equivalent = [["a", "b"]] }`, "", "", false},
		{"covers", `{ covers = { "80+" = ["80", "86"] } }`, "80+", "86", true},
		{"covers, not the other way", `{ covers = { "80+" = ["80", "86"] } }`, "86", "80+", false},
		{"matches", `{ build_matches = '^v2:' }`, "v2:6", "", true},
		{"matches, does not", `{ runtime_matches = '^v2:' }`, "v2:6", "v1:6", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			set, err := Parse("f.toml",
				[]byte("[[ep.X.rule]]\nname = 'n'\nwhen.sdk_version = "+c.when+
					"\nverdict = 'optimal'\nreason = 'r'\n"))
			require.NoError(t, err)
			j := set.Judge(Facts{EP: "X", SDKVersion: c.build},
				Facts{EP: "X", SDKVersion: c.runtime})
			require.Equal(t, c.holds, j.Verdict == compilers.Optimal, j.Reason)
		})
	}
}

func TestExtracts(t *testing.T) {
	set, err := Parse("f.toml", []byte(`
[[ep.X.extract]]
regexp = '^new:(?P<version>\d+)$'
[[ep.X.extract]]
regexp = '^old:(?P<version>\d+):(?P<more>.*)$'
[[ep.X.extract]]
regexp = '(?P<version>\d)$'
[[ep.X.extract]]
json = "outer.inner"
as = "deep"
[[ep.X.extract]]
from = "deep"
regexp = 'v=(?P<version>\d+)'
[[ep.X.rule]]
name = "n"
when.version = "build < runtime"
verdict = "optimal"
reason = "{build.version} {runtime.version} {build.deep} {runtime.more}"
`))
	require.NoError(t, err)
	for name, c := range map[string]struct{ build, runtime, reason string }{
		"two forms":           {"new:3", "old:4:x", "3 4 unknown x"},
		"the first that fits": {"new:35", "new:47", "35 47 unknown unknown"},
		"out of JSON":         {`{"outer":{"inner":"a;v=3"}}`, "new:4", "3 4 a;v=3 unknown"},
		"a number in JSON":    {`{"outer":{"inner":7}}`, "new:4", ""},
		"not JSON":            {`{"outer":`, "new:4", ""},
		"another shape":       {`{"outer":["inner"]}`, "new:4", ""},
		"neither form":        {"x", "new:4", ""},
		"larger than a fact":  {"new:3", `old:4:` + string(make([]byte, maxFact)), ""},
	} {
		t.Run(name, func(t *testing.T) {
			j := set.Judge(Facts{EP: "X", CompatibilityString: c.build},
				Facts{EP: "X", CompatibilityString: c.runtime})
			if c.reason == "" {
				require.Equal(t, compilers.Unknown, j.Verdict)
				return
			}
			require.Equal(t, c.reason, j.Reason)
		})
	}
}
