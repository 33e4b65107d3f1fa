// Package usage prints the help of the commands, and explains mistakes in calls.
package usage

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/epcached/epcached/internal/suggest"
)

// widest is the width of help on wider terminals, and if the output is not a terminal.
const widest = 100

// Error is a mistake in a call, with a hint.
type Error struct {
	Text, Hint string
}

func (e *Error) Error() string { return e.Text }

// Set gives a command and those below it help that fits the terminal, and errors about their flags
// in plain words. wrap converts the errors to the program's type.
func Set(root *cobra.Command, wrap func(*Error) error) {
	printHelp := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		out := cmd.OutOrStdout()
		var text bytes.Buffer
		cmd.SetOut(&text)
		printHelp(cmd, args)
		cmd.SetOut(out)
		fmt.Fprint(out, Fit(text.String(), widthOf(out)))
	})
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return wrap(flagError(cmd, err))
	})
	root.SetHelpCommand(&cobra.Command{
		Use:     "help [VERB]",
		Short:   "show the help of a verb",
		Long:    "help shows the help of a verb, as VERB --help does.",
		Example: "  " + root.Name() + " help list",
		RunE: func(_ *cobra.Command, args []string) error {
			cmd, rest, err := root.Find(args)
			if err != nil || len(rest) > 0 {
				return wrap(unknownVerb(cmd, append(rest, args...)[0]))
			}
			cmd.InitDefaultHelpFlag()
			return cmd.Help()
		},
	})
}

// Arguments returns the check of a command that takes from least to most arguments.
func Arguments(least, most int, wrap func(*Error) error) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		text := "an argument is missing"
		switch {
		case len(args) >= least && len(args) <= most:
			return nil
		case len(args) > most && cmd.HasAvailableSubCommands():
			return wrap(unknownVerb(cmd, args[0]))
		case len(args) > most:
			text = fmt.Sprintf("unexpected argument %q", args[most])
		}
		if !cmd.HasParent() {
			return wrap(mistake(cmd, text, cmd.Name()+" --help"))
		}
		return wrap(mistake(cmd, text, "usage: "+cmd.UseLine()))
	}
}

// mistake names the verb that the mistake is about.
func mistake(cmd *cobra.Command, text, hint string) *Error {
	if _, verb, is := strings.Cut(cmd.CommandPath(), " "); is {
		text = verb + ": " + text
	}
	return &Error{text, hint}
}

func unknownVerb(cmd *cobra.Command, name string) *Error {
	var verbs []string
	for _, verb := range cmd.Commands() {
		verbs = append(verbs, verb.Name())
	}
	return mistake(cmd, fmt.Sprintf("unknown verb %q", name),
		cmp.Or(suggest.Hint("", name, verbs), cmd.CommandPath()+" --help"))
}

func flagError(cmd *cobra.Command, err error) *Error {
	help := cmd.CommandPath() + " --help"
	switch e := err.(type) {
	case *pflag.NotExistError:
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		name, prefix := e.GetSpecifiedName(), "--"
		if e.GetSpecifiedShortnames() != "" {
			name, prefix, names = name[:1], "-", nil
		}
		return mistake(cmd, "unknown flag "+prefix+name,
			cmp.Or(suggest.Hint("--", name, names), help))
	case *pflag.ValueRequiredError:
		return mistake(cmd, fmt.Sprintf("--%s needs a value", e.GetFlag().Name), help)
	case *pflag.InvalidValueError:
		value := []rune(e.GetValue()) // shortened, because it may be a whole file
		text := fmt.Sprintf("--%s: invalid value %q", e.GetFlag().Name,
			string(value[:min(len(value), 80)]))
		if what, is := kinds[e.GetFlag().Value.Type()]; is {
			text += ": it must be " + what
		} else if len(value) < 80 {
			text += fmt.Sprintf(": %v", e.Unwrap())
		}
		return mistake(cmd, text, help)
	case *pflag.InvalidSyntaxError:
		return mistake(cmd, fmt.Sprintf("%q is not a flag", e.GetSpecifiedFlag()), help)
	}
	return mistake(cmd, err.Error(), help)
}

// kinds are the values of pflag's own types. Their own errors name functions of Go.
var kinds = map[string]string{
	"bool": "true or false", "duration": "a duration, such as 30s or 5m", "int": "a whole number",
	"uint": "a whole number of at least 0", "uint32": "a whole number of at least 0",
	"uint64": "a whole number of at least 0", "float64": "a number",
}

func widthOf(out io.Writer) int {
	if f, is := out.(*os.File); is {
		if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
			return min(width, widest)
		}
	}
	return widest
}

// cell is the beginning of a line of a list: a flag, a verb or a number, before its explanation.
var cell = regexp.MustCompile(`^ +\S.*?(?:  +|$)|^ *`)

// Fit joins the lines of each paragraph, and breaks lines that are wider than a terminal. The lines
// of a list are kept, and wrapped below their explanations.
func Fit(text string, width int) string {
	var out strings.Builder
	var line string
	flush := func() {
		indent := len(cell.FindString(line))
		if indent > width/2 || indent == len(line) {
			indent = min(len(line)-len(strings.TrimLeft(line, " "))+4, width/2)
		}
		for len(line) > width {
			at := strings.LastIndex(line[:width+1], " ")
			if at <= indent {
				if at = strings.Index(line[indent:], " ") + indent; at < indent {
					break
				}
			}
			out.WriteString(strings.TrimRight(line[:at], " ") + "\n")
			line = strings.Repeat(" ", indent) + strings.TrimLeft(line[at:], " ")
		}
		out.WriteString(line)
	}
	prose := func(s string) bool { return s != "" && s[0] != ' ' }
	for i, next := range strings.Split(text, "\n") {
		if i > 0 && prose(line) && prose(next) {
			line += " " + next
			continue
		}
		if i > 0 {
			flush()
			out.WriteByte('\n')
		}
		line = next
	}
	flush()
	return out.String()
}
