package main

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

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
)

// become runs the program in the place of this process: so it has the descriptor of the view under the same
// number, gets its signals itself, and its exit status needs no passing on. The build is held until it ends, for the
// descriptor is the lease.
func (g *getCall) become(results []got) error {
	paths := make([]string, len(results))
	var views []*os.File
	for i := range results {
		path, err := results[i].graphPath()
		if err != nil {
			return exit.Failing("get", results[i].path, err)
		}
		paths[i] = path
		if results[i].view != nil && !results[i].told() {
			views = append(views, results[i].view)
		}
	}
	program, err := findProgram(g.program[0])
	if err != nil {
		return exit.Failing("run", g.program[0], err)
	}
	argv := fillPlaces(g.program, paths)
	g.app.Print.Clear()
	if told, err := tellProgram(results); err != nil {
		return exit.Failing("run", program, err)
	} else if !told {
		g.app.Print.Warning(fmt.Sprintf("run %q: %s is left out: it would take more than %d bytes; ask for fewer models at once", program, toldVariable, maxTold))
	}
	if err := replaceProcess(program, argv, views); err != nil {
		return exit.Failing("run", program, err)
	}
	return nil
}

// findProgram finds what is to be run as a shell does. One that is not in PATH is not there: errors.Is(err, fs.ErrNotExist) holds.
func findProgram(name string) (string, error) {
	path, err := exec.LookPath(name)
	if errors.Is(err, exec.ErrNotFound) {
		return "", exit.Missing("there is no such program in PATH")
	}
	if err != nil {
		return "", cmp.Or(errors.Unwrap(err), err)
	}
	return path, nil
}

// toldVariable has for the program what get --json prints: a graph is to be loaded with exactly the options that stand there.
const toldVariable = "EPCACHE_GET"

// maxTold bounds it, in bytes: with a variable of 128 KiB (MAX_ARG_STRLEN) Linux starts no program.
const maxTold = 128<<10 - len(toldVariable) - len("=\x00")

// tellProgram sets the variable, and tells whether there is room for all of it: a part would be read as the whole.
func tellProgram(results []got) (told bool, err error) {
	list := make([]any, len(results))
	for i := range results {
		list[i] = results[i].json(false)
	}
	text, err := json.Marshal(list)
	if err != nil {
		return false, err
	}
	if len(text) > maxTold {
		return false, os.Unsetenv(toldVariable) // what the caller's own caller was told is not about these models
	}
	return true, os.Setenv(toldVariable, string(text))
}

// checkPlaces holds the places in a program's arguments against the number of models, before anything is compiled.
func checkPlaces(program []string, models int) error {
	if len(program) == 0 {
		return nil
	}
	found, other := false, ""
	for _, arg := range program[1:] {
		if strings.Contains(arg, "{}") {
			found = true
			if models > 1 && arg != "{}" {
				return exit.Usage(exit.Hint(fmt.Errorf("argument %q: of %d models, which one?", arg, models), "write {1}, {2}, ... or give {} as an argument of its own"))
			}
		}
		for i := range models {
			found = found || strings.Contains(arg, place(i))
		}
		if other == "" {
			other = numbered.FindString(arg)
		}
	}
	if !found && other != "" {
		return exit.Usage(fmt.Errorf("the program's arguments have no {} for the graph's path, and %s is none: there are models 1 to %d", other, models))
	}
	if !found {
		return exit.Usage(exit.Hint(errors.New("the program's arguments have no {} for the graph's path"), "epcachectl get model.onnx --ep EP -- program {}"))
	}
	return nil
}

// numbered is a place for the path of one of several graphs.
var numbered = regexp.MustCompile(`\{[0-9]+\}`)

func place(i int) string { return "{" + strconv.Itoa(i+1) + "}" }

func fillPlaces(program, paths []string) []string {
	argv := []string{program[0]}
	for _, arg := range program[1:] {
		if arg == "{}" {
			argv = append(argv, paths...)
			continue
		}
		for i, path := range paths {
			arg = strings.ReplaceAll(arg, place(i), path)
		}
		argv = append(argv, strings.ReplaceAll(arg, "{}", paths[0]))
	}
	return argv
}
