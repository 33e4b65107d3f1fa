package epcached

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	// pythonComment matches the text of a comment.
	pythonComment = regexp.MustCompile(`(?:^|\s)# (.*)$`)
	// docstring matches a string in triple quotes that begins a line.
	docstring = regexp.MustCompile(`(?ms)^ *"""(.*?)"""`)
	// pythonRiddle matches names of tests that say nothing of the behaviour.
	pythonRiddle = regexp.MustCompile(
		`(?m)^def test_(?:what|who|whoever|whose|nothing|nobody|somebody|it|that|they)_\w*`)
)

// pythonTexts returns the comments and docstrings of a Python file.
func pythonTexts(source string) (texts []string) {
	for _, found := range docstring.FindAllStringSubmatch(source, -1) {
		texts = append(texts, found[1])
	}
	joined := false // whether the last line was a comment on its own
	for _, line := range strings.Split(source, "\n") {
		found := pythonComment.FindStringSubmatch(line)
		alone := strings.HasPrefix(strings.TrimSpace(line), "# ")
		switch {
		case found == nil:
		case alone && joined:
			texts[len(texts)-1] += " " + found[1]
		default:
			texts = append(texts, found[1])
		}
		joined = alone
	}
	return texts
}

func TestPythonCommentsNameTheActor(t *testing.T) {
	for _, name := range filesOf(t, ".py") {
		source, err := os.ReadFile(name)
		require.NoError(t, err)
		for _, text := range pythonTexts(string(source)) {
			// In backquotes it is the name of a Unix user.
			text = strings.ReplaceAll(strings.Join(strings.Fields(text), " "), "`nobody`", "")
			for _, b := range banned {
				if found := b.pattern.FindString(text); found != "" {
					t.Errorf("%s: %q: %s", name, found, b.instead)
				}
			}
		}
		for _, found := range pythonRiddle.FindAllString(string(source), -1) {
			t.Errorf("%s: %s: begin with the subject: test_put_sends_all_files", name, found)
		}
	}
}
