package rules

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// example finds the files in doc/rules.md.
var example = regexp.MustCompile("(?s)```toml\n(.*?)```")

func TestExamplesOfTheDocumentParse(t *testing.T) {
	text, err := os.ReadFile("../../doc/rules.md")
	require.NoError(t, err)
	examples := example.FindAllStringSubmatchIndex(string(text), -1)
	require.Greater(t, len(examples), 5)
	for _, at := range examples {
		line := strings.Count(string(text[:at[2]]), "\n")
		// so that mistakes have the document's lines
		set, err := Parse("doc/rules.md",
			[]byte(strings.Repeat("\n", line)+string(text[at[2]:at[3]])))
		require.NoError(t, err)
		require.NotEmpty(t, set.EPs())
	}
}

// The document names every fact and field, because users find no others.
func TestTheDocumentNamesEverything(t *testing.T) {
	text, err := os.ReadFile("../../doc/rules.md")
	require.NoError(t, err)
	doc := string(text)
	for _, fact := range givenNames {
		require.Contains(t, doc, "| `"+fact+"` |")
	}
	for _, word := range []string{Stale, NotStale, Unclear, "optimal", "prefer_recompilation",
		"unsupported", "unknown", "{build.FACT}", "{runtime.FACT}", "{ep}", "{rule}", "{code}"} {
		require.Contains(t, doc, "`"+word+"`")
	}
	for _, word := range []string{"equivalent", "covers", "build_matches", "runtime_matches",
		"build unknown", "both known"} {
		require.Contains(t, doc, word)
	}
}

func TestTheDocumentsMessageIsTrue(t *testing.T) {
	text, err := os.ReadFile("../../doc/rules.md")
	require.NoError(t, err)
	_, wrong := Parse("/etc/epcached/rules.toml",
		[]byte(strings.Replace(good, "optimal", "good", 1)))
	require.Contains(t, string(text), "    "+wrong.Error()+"\n")
}
