package ort

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSlotsAgreeWithTheHeader lets a C compiler say where each function stands in the public
// header.
func TestSlotsAgreeWithTheHeader(t *testing.T) {
	headers := headerDir(t)
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler")
	}
	var program strings.Builder
	program.WriteString("#include <stddef.h>\n#include <stdio.h>\n#include " +
		"\"onnxruntime_c_api.h\"\nint main(void) {\n")
	for _, f := range declared {
		fmt.Fprintf(&program, "printf(\"%%zu\\n\", offsetof(%s, %s) / sizeof(void *));\n", f.table,
			f.field)
	}
	program.WriteString("return 0; }\n")
	source, binary := filepath.Join(t.TempDir(), "slots.c"), filepath.Join(t.TempDir(), "slots")
	require.NoError(t, os.WriteFile(source, []byte(program.String()), 0o600))
	out, err := exec.Command(cc, "-I", headers, "-o", binary, source).CombinedOutput()
	require.NoError(t, err, "%s", out)
	out, err = exec.Command(binary).Output()
	require.NoError(t, err)
	lines := strings.Fields(string(out))
	require.Len(t, lines, len(declared))
	for i, f := range declared {
		require.Equal(t, lines[i], fmt.Sprint(f.slot), "%s.%s", f.table, f.field)
	}
}

// headerDir looks for the headers where Go keeps the module that ships them. It fetches nothing:
// testdata/ep/headers does.
func headerDir(t *testing.T) string {
	out, err := exec.Command("go", "env", "GOMODCACHE").Output()
	require.NoError(t, err)
	dir := filepath.Join(strings.TrimSpace(string(out)), "github.com/yalue/onnxruntime_go@v1.27.0")
	if _, err := os.Stat(filepath.Join(dir, "onnxruntime_c_api.h")); err != nil {
		t.Skip("ONNX Runtime's headers are not there; testdata/ep/headers fetches them")
	}
	return dir
}

func TestFunctionsAreDeclaredOnce(t *testing.T) {
	seen := map[string]bool{}
	for _, f := range declared {
		at := fmt.Sprint(f.table, f.slot)
		require.False(t, seen[at], "%s.%s", f.table, f.field)
		seen[at] = true
	}
}
