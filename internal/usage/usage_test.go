package usage

import (
	"bytes"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

// newProgram returns a program with two verbs that writes to the buffer.
func newProgram() (*cobra.Command, *bytes.Buffer) {
	var out bytes.Buffer
	wrap := func(e *Error) error { return e }
	root := &cobra.Command{Use: "p", Args: Arguments(0, 0, wrap), SilenceErrors: true,
		SilenceUsage: true, RunE: func(*cobra.Command, []string) error { return nil }}
	show := &cobra.Command{Use: "show NAME", Short: "show a thing", Args: Arguments(1, 1, wrap),
		Long: strings.Repeat("words of a paragraph ", 10) +
			"\nand its end.\n\nStatus:\n    0  done",
		RunE: func(*cobra.Command, []string) error { return nil }}
	show.Flags().Duration("limit", 0, "a `DURATION` "+strings.Repeat("that is explained ", 8))
	root.AddCommand(show, &cobra.Command{Use: "list", Run: func(*cobra.Command, []string) {}})
	root.SetOut(&out)
	Set(root, wrap)
	return root, &out
}

func TestMistakesInPlainWords(t *testing.T) {
	for line, want := range map[string][2]string{
		"lits":           {`unknown verb "lits"`, "did you mean list?"},
		"frobnicate":     {`unknown verb "frobnicate"`, "p --help"},
		"help sohw":      {`unknown verb "sohw"`, "did you mean show?"},
		"show":           {"show: an argument is missing", "usage: p show NAME [flags]"},
		"show a b":       {`show: unexpected argument "b"`, "usage: p show NAME [flags]"},
		"show a --limti": {"show: unknown flag --limti", "did you mean --limit?"},
		"show a -x":      {"show: unknown flag -x", "p show --help"},
		"show --limit":   {"show: --limit needs a value", "p show --help"},
		"show --limit=1k": {
			`show: --limit: invalid value "1k": it must be a duration, such as 30s or 5m`,
			"p show --help"},
		"show --=": {`show: "--=" is not a flag`, "p show --help"},
	} {
		root, _ := newProgram()
		root.SetArgs(strings.Fields(line))
		err := root.Execute()
		require.IsType(t, &Error{}, err, line)
		require.Equal(t, want, [2]string{err.Error(), err.(*Error).Hint}, line)
	}
}

func TestHelpFitsTheTerminal(t *testing.T) {
	root, out := newProgram()
	root.SetArgs([]string{"help", "show"})
	require.NoError(t, root.Execute())
	for line := range strings.Lines(out.String()) {
		require.LessOrEqual(t, len(line), widest+1, line)
	}
	require.Contains(t, out.String(), "Status:\n    0  done\n")
	narrow := Fit(strings.Repeat("words of a paragraph ",
		5)+"\nend\n  -h, --help   show what there is to "+
		"know\n      --a-long-name DURATION   give up after this", 40)
	require.Equal(t, `words of a paragraph words of a
paragraph words of a paragraph words of
a paragraph words of a paragraph  end
  -h, --help   show what there is to
               know
      --a-long-name DURATION   give up
          after this`, narrow)
}
