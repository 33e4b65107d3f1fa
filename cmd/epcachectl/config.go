package main

import (
	"errors"
	"io/fs"
	"os"
	"reflect"
	"strings"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/internal/config"
)

type configResult struct {
	File     string        `json:"file"`
	Errors   config.Errors `json:"errors"`
	Warnings config.Errors `json:"warnings"` // of fields that have no effect any more
}

var configCodes = []int{exit.Done, exit.Failed, exit.BadUsage, exit.NotFound, exit.NotAllowed}

func newConfig(a *cli.Call) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config check|show [FILE]",
		Short: "check or show the configuration",
		Long: `config reads a configuration file as epcached does, without a daemon.

The default FILE is the user's: $XDG_CONFIG_HOME/epcached/epcached.toml, or
~/.config/epcached/epcached.toml, or ` + config.DefaultFile + ` if that does not exist.
Flags of a running daemon are not read; see epcached --check-config.` + exit.Help(configCodes...),
		Example: `  epcachectl config check
  epcachectl config show ./epcached.toml`,
		Args: cli.UsageArgs(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newConfigCheck(a), newConfigShow(a))
	return cmd
}

func newConfigCheck(a *cli.Call) *cobra.Command {
	return &cobra.Command{
		Use:   "check [FILE]",
		Short: "report mistakes in a configuration file",
		Long: `check prints every mistake in the file, and in its rule files, with file, line and
column. It warns of fields that were removed and have no effect.
Nothing else that the file names is opened or made.` + exit.Help(configCodes...),
		Example: "  epcachectl config check\n  epcachectl config check ./epcached.toml",
		Args:    cli.UsageArgs(0, 1),
		RunE: func(_ *cobra.Command, args []string) error {
			file, load := configFile(args)
			s, err := load(file)
			if err == nil {
				_, err = s.LoadRules()
			} else if _, wrong := errors.AsType[config.Errors](err); !wrong {
				return withConfigHint(err)
			}
			var warnings config.Errors
			if s != nil {
				warnings = s.Warnings()
			}
			return printConfigErrors(a, file, warnings, err)
		},
	}
}

func newConfigShow(a *cli.Call) *cobra.Command {
	return &cobra.Command{
		Use:   "show [FILE]",
		Short: "print every value and its origin",
		Long: `show prints the configuration of a daemon that reads this file: every value,
including defaults, and where it comes from. The output is itself a configuration file. If there is
no file, it prints the defaults.` + exit.Help(configCodes...),
		Example: "  epcachectl config show",
		Args:    cli.UsageArgs(0, 1),
		RunE: func(_ *cobra.Command, args []string) error {
			file, load := configFile(args)
			s, err := load(file)
			if len(args) == 0 && errors.Is(err, fs.ErrNotExist) {
				s, err = config.Load("")
			}
			if err != nil {
				return withConfigHint(err)
			}
			if !a.JSON {
				a.Print.Clear()
				return s.Print(a.Print.Out)
			}
			fields := s.Fields()
			for i, f := range fields {
				// In JSON a nil list would be null.
				if v := reflect.ValueOf(f.Value); v.Kind() == reflect.Slice && v.IsNil() {
					fields[i].Value = []string{}
				}
			}
			return a.Print.JSON(fields)
		},
	}
}

// configFile returns the named file, or the one that a daemon reads by default, with the function
// that reads it.
func configFile(args []string) (file string, load func(string) (*config.Settings, error)) {
	if len(args) > 0 {
		return args[0], config.Load
	}
	own := config.UserFile()
	if _, err := os.Stat(own); err == nil {
		return own, config.LoadUserFile
	}
	return config.DefaultFile, config.Load
}

func withConfigHint(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return exit.Hint(err, "a daemon needs no configuration file; to show the defaults: "+
			"epcachectl config show")
	}
	return err
}

// printConfigErrors prints mistakes as a result, because the verb's purpose is to find them.
func printConfigErrors(a *cli.Call, file string, warnings config.Errors, err error) error {
	wrong, is := errors.AsType[config.Errors](err)
	if !is && err != nil {
		for line := range strings.SplitSeq(err.Error(), "\n") {
			wrong = append(wrong, &config.Error{Field: "rules", Text: line})
		}
	}
	// Lists in JSON are never null.
	result := configResult{file, append(config.Errors{}, wrong...),
		append(config.Errors{}, warnings...)}
	if a.JSON {
		if err := a.Print.JSON(result); err != nil {
			return err
		}
	} else {
		for _, w := range warnings {
			a.Print.Line("warning: %s", term.Printable(w.Error()))
		}
	}
	switch {
	case err != nil && !a.JSON:
		for line := range strings.SplitSeq(err.Error(), "\n") {
			a.Print.Line("%s", term.Printable(line))
		}
	case !a.JSON:
		a.Print.Line("%s: no mistakes", term.Printable(file))
	}
	if err != nil {
		return exit.Status(exit.Failed)
	}
	return nil
}
