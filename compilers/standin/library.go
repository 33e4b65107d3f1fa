package standin

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/epcached/epcached/compilers"
)

// EP is the name of the stand-in's EP.
const EP = "StandInExecutionProvider"

const libraryName = "libonnxruntime_providers_standin.so"

// Table describes the EP for compilers.AddEPs, which New calls.
const Table = `
[ep.StandInExecutionProvider]
libraries = ["` + libraryName + `"]
fingerprint_options = ["hardware"]
hardware = '^standin:[^:]*:(.*)$'

[ep.StandInExecutionProvider.options]
fault = { policy = "allowed", kind = "string" }
hardware = { policy = "allowed", kind = "string" }
level = { policy = "allowed", kind = "int", default = "0" }
fast = { policy = "allowed", kind = "bool", default = "0" }
tuning = { policy = "allowed", kind = "json" }
cache_dir = { policy = "refused", kind = "string" }
plugin = { policy = "library", kind = "string", default = "libstandin_plugin.so" }
`

// SDK is what the stand-in's library says of itself.
type SDK struct {
	Version  string // e.g. "1.0"; versions of one major number load each other's binaries
	Hardware string // e.g. "sim-1"
}

// Library writes, or replaces by rename, a runtime in dir: a libonnxruntime that is none, of the
// given version, and the EP library. Both are regular files of a few bytes. It returns what
// compilers.Find returns for dir.
func Library(dir, ort string, sdk SDK) (compilers.Runtime, error) {
	if err := addEP(); err != nil {
		return compilers.Runtime{}, err
	}
	files := map[string]string{
		"libonnxruntime.so." + ort: "not a library\n",
		libraryName:                fmt.Sprintf("stand-in\n%s\n%s\n", sdk.Version, sdk.Hardware),
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return compilers.Runtime{}, err
	}
	for name, text := range files {
		temporary := filepath.Join(dir, "."+name)
		if err := os.WriteFile(temporary, []byte(text), 0o644); err != nil {
			return compilers.Runtime{}, err
		}
		if err := os.Rename(temporary, filepath.Join(dir, name)); err != nil {
			return compilers.Runtime{}, err
		}
	}
	return compilers.Find(dir)
}

// sdkOf reads the library file again in each job, as a real EP library would be loaded.
func sdkOf(r compilers.Runtime, ep compilers.EP) (SDK, error) {
	path := ep.Library
	if path == "" {
		lib, err := r.Library(ep.Name)
		if err != nil {
			return SDK{}, err
		}
		path = lib.Path
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return SDK{}, &compilers.RefusedError{Doing: "register " + ep.Name, Code: 1,
			Text: err.Error()}
	}
	lines := strings.Split(string(text), "\n")
	if len(lines) < 3 || lines[0] != "stand-in" {
		return SDK{}, &compilers.RefusedError{Doing: "register " + ep.Name, Code: 1,
			Text: path + " is not a stand-in library"}
	}
	sdk := SDK{Version: lines[1], Hardware: lines[2]}
	if hw := ep.Options["hardware"]; hw != "" {
		sdk.Hardware = hw
	}
	return sdk, nil
}

// compatibility returns the compatibility string for artefacts.
func (s SDK) compatibility() string { return "standin:" + s.Version + ":" + s.Hardware }

// verdict judges another's string as an EP would: the same is optimal, another minor version loads
// but should be made again, and other hardware or another major version does not load.
func (s SDK) verdict(info string) compilers.Verdict {
	parts := strings.SplitN(info, ":", 3)
	if len(parts) != 3 || parts[0] != "standin" {
		return compilers.Unknown
	}
	major := func(version string) string { m, _, _ := strings.Cut(version, "."); return m }
	switch {
	case info == s.compatibility():
		return compilers.Optimal
	case parts[2] == s.Hardware && major(parts[1]) == major(s.Version):
		return compilers.PreferRecompilation
	}
	return compilers.Unsupported
}
