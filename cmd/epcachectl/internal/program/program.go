// Package program starts programs: in place of this process with an artefact, or as a child in
// which ONNX Runtime sessions use the cache.
package program

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
)

// Find finds a program as a shell does. If it is not in PATH, errors.Is(err, fs.ErrNotExist) is
// true.
func Find(name string) (string, error) {
	path, err := exec.LookPath(name)
	if errors.Is(err, exec.ErrNotFound) {
		return "", exit.Missing("there is no such program in PATH")
	}
	if err != nil {
		return "", cmp.Or(errors.Unwrap(err), err)
	}
	return path, nil
}

// ResultVariable is the environment variable with the output of get --json for the program, because
// a graph must be loaded with exactly the options in it.
const ResultVariable = "EPCACHE_GET"

// MaxResultBytes bounds the variable, because Linux starts no program with a variable of 128 KiB
// (MAX_ARG_STRLEN).
const MaxResultBytes = 128<<10 - len(ResultVariable) - len("=\x00")

// SetResultVariable sets the variable, and reports whether the results fit. It does not set a part
// of them.
func SetResultVariable(results []any) (fits bool, err error) {
	text, err := json.Marshal(results)
	if err != nil {
		return false, err
	}
	if len(text) > MaxResultBytes {
		// a value from the environment of this process is about other models
		return false, os.Unsetenv(ResultVariable)
	}
	return true, os.Setenv(ResultVariable, string(text))
}

// CheckPlaceholders compares the placeholders in a program's arguments with the number of models.
func CheckPlaceholders(program []string, models int) error {
	if len(program) == 0 {
		return nil
	}
	found, other := false, ""
	for _, arg := range program[1:] {
		if strings.Contains(arg, "{}") {
			found = true
			if models > 1 && arg != "{}" {
				return exit.Usage(exit.Hint(fmt.Errorf("argument %q: it does not say which of "+
					"%d models", arg, models), "write {1}, {2}, ... or give {} as an argument "+
					"of its own"))
			}
		}
		for i := range models {
			found = found || strings.Contains(arg, placeholderOf(i))
		}
		other = cmp.Or(other, numbered.FindString(arg))
	}
	if !found && other != "" {
		return exit.Usagef("%s: there are only models 1 to %d", other, models)
	}
	if !found {
		return exit.Usage(exit.Hint(
			errors.New("the program's arguments have no {} for the graph's path"),
			"epcachectl get model.onnx --ep EP -- program {}"))
	}
	return nil
}

var numbered = regexp.MustCompile(`\{[0-9]+\}`)

func placeholderOf(i int) string { return "{" + strconv.Itoa(i+1) + "}" }

// FillPlaceholders returns the program's arguments with the paths for placeholders.
func FillPlaceholders(program, paths []string) []string {
	argv := []string{program[0]}
	for _, arg := range program[1:] {
		if arg == "{}" {
			argv = append(argv, paths...)
			continue
		}
		for i, path := range paths {
			arg = strings.ReplaceAll(arg, placeholderOf(i), path)
		}
		argv = append(argv, strings.ReplaceAll(arg, "{}", paths[0]))
	}
	return argv
}

// Replace executes another program in this process, which inherits the files with their numbers. It
// returns only on failure.
func Replace(path string, argv []string, files []*os.File) error {
	for _, f := range files {
		if _, err := unix.FcntlInt(f.Fd(), unix.F_SETFD, 0); err != nil {
			return fmt.Errorf("pass the view on: %w", err)
		}
	}
	return syscall.Exec(path, argv, os.Environ())
}
