package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/compilertest"
)

// Each story of testdata/stories is a session at a terminal, with the built programs and a real
// runtime. Beside testscript's own commands it has
//
//	model FILE [SEED]       write a small ONNX model; other seeds have other weights
//	exits STATUS PROGRAM..  run a program that must exit with STATUS
//	block FILE N HEADING [OLD=NEW]..  write the Nth block of code below a heading of
//	                        doc/sharing.md to FILE, with other words for some
func TestStories(t *testing.T) {
	runtime := runtimeDir(t, openVINO)
	stories, err := filepath.Glob("../../testdata/stories/*.txtar")
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(stories), 15)
	testscript.Run(t, testscript.Params{
		Dir:                "../../testdata/stories",
		RequireUniqueNames: true,
		Setup: func(e *testscript.Env) error {
			e.Setenv("PATH", programs+string(os.PathListSeparator)+os.Getenv("PATH"))
			e.Setenv("RUNTIME", runtime)
			e.Setenv("EPCACHE_SOCKET", filepath.Join(e.WorkDir, "socket"))
			e.Setenv("EPCACHE_AUTOSTART", "0")
			e.Setenv("ORT_DISABLE_TELEMETRY", "1")
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"model": storyModel, "exits": exitsWith, "block": documentedBlock,
		},
	})
}

// storyModel writes a model of 64 kB, which OpenVINO compiles in a tenth of a second.
func storyModel(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 1 || len(args) > 2 {
		ts.Fatalf("usage: model FILE [SEED]")
	}
	seed := uint64(1)
	if len(args) == 2 {
		var err error
		seed, err = strconv.ParseUint(args[1], 10, 32)
		ts.Check(err)
	}
	file := ts.MkAbs(args[0])
	ts.Check(os.MkdirAll(filepath.Dir(file), 0o755))
	ts.Check(os.WriteFile(file, compilertest.Dense(seed, 128, 1), 0o644))
}

func exitsWith(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits STATUS PROGRAM ARGS...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	status := 0
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		status = exit.ExitCode()
	default:
		ts.Check(err)
	}
	if status != want {
		ts.Fatalf("exit status %d, want %d", status, want)
	}
}

func documentedBlock(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 3 {
		ts.Fatalf("usage: block FILE N HEADING [OLD=NEW]...")
	}
	n, err := strconv.Atoi(args[1])
	ts.Check(err)
	document, err := os.ReadFile("../../doc/sharing.md")
	ts.Check(err)
	_, section, found := strings.Cut(string(document), "\n## "+args[2]+"\n")
	if !found {
		ts.Fatalf("doc/sharing.md has no heading %q", args[2])
	}
	section, _, _ = strings.Cut(section, "\n## ")
	blocks := regexp.MustCompile(`(?m)(^    .*\n)+`).FindAllString(section, -1)
	if n > len(blocks) {
		ts.Fatalf("%q has %d blocks of code", args[2], len(blocks))
	}
	text := blocks[n-1]
	for _, replace := range args[3:] {
		from, to, _ := strings.Cut(replace, "=")
		if !strings.Contains(text, from) {
			ts.Fatalf("the block has no %q:\n%s", from, text)
		}
		text = strings.ReplaceAll(text, from, to)
	}
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(text), 0o644))
}
