package portable

import (
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Config describes a build: its manifest without the fields of one machine (id, scope, user, paths,
// source model, time). Two machines that compile the same model write equal configs.
type Config struct {
	Version     int    `json:"version"` // 1
	BuildKey    Hash   `json:"build_key"`
	ModelDigest Hash   `json:"model_digest"`
	ModelName   string `json:"model_name,omitempty"` // only if names are exported
	Record      []byte `json:"record"`               // the canonical request record
	EPs         []EP   `json:"eps"`                  // in the order of the request
	ORTVersion  string `json:"ort_version"`
	Route       string `json:"route"`
	Graph       string `json:"graph"` // the name of one of files
	Files       []File `json:"files"` // in the order of the manifest's layers
	Level       string `json:"graph_optimization_level,omitempty"`
	IRVersion   int64  `json:"ir_version"`
	Embed       bool   `json:"embed"`

	Members []Member `json:"members,omitempty"` // of a group: all, the first is the model above

	// Sketches of large files, in the order of files; empty: none. By them a reader finds local
	// files that share bytes.
	Sketches [][]byte `json:"sketches,omitempty"`
}

// EP is an execution provider that made the build.
type EP struct {
	Name                string   `json:"name"`
	Version             string   `json:"version"`
	LibraryDigest       Hash     `json:"library_digest"`
	SDKVersion          string   `json:"sdk_version"`
	Hardware            string   `json:"hardware_architecture"`
	CompatibilityString string   `json:"compatibility_string"`
	DriverVersion       string   `json:"driver_version"`
	Devices             []string `json:"devices,omitempty"`
	TookNone            bool     `json:"took_none,omitempty"`
}

// File is one file of the build.
type File struct {
	Name string `json:"name"`
	Size int64  `json:"size"`
	Hash Hash   `json:"blake3"`
}

// Member is one model of a group.
type Member struct {
	ModelDigest Hash   `json:"model_digest"`
	Graph       string `json:"graph"`
	Alone       bool   `json:"alone,omitempty"` // the group answers requests for this model alone
}

const configVersion = 1

// Bounds of a build, equal to those of a put.
const (
	MaxFiles   = 64
	maxName    = 255
	maxDepth   = 4
	maxText    = 4 << 10
	maxEPs     = 16
	maxMembers = 64
	maxRecord  = 256 << 10
	maxConfig  = 1 << 20
	maxSketch  = 4 << 10

	// MaxSketched is how many files of a build have a sketch, so that cards stay small.
	MaxSketched = 16
)

// ParseConfig reads a config, and checks it.
func ParseConfig(file string, raw []byte) (*Config, error) {
	c := new(Config)
	if err := decode(file, raw, maxConfig, c); err != nil {
		return nil, err
	}
	return c, c.check(file)
}

func (c *Config) check(file string) error {
	switch {
	case c.Version != configVersion:
		return wrong(file, "version", "%d, not %d: a newer epcached may read it", c.Version,
			configVersion)
	case len(c.Record) == 0 || len(c.Record) > maxRecord:
		return wrong(file, "record", "%d bytes, not 1 to %d", len(c.Record), maxRecord)
	case len(c.EPs) == 0 || len(c.EPs) > maxEPs:
		return wrong(file, "eps", "%d execution providers, not 1 to %d", len(c.EPs), maxEPs)
	case len(c.Members) == 1 || len(c.Members) > maxMembers:
		return wrong(file, "members", "%d, not 0 or 2 to %d", len(c.Members), maxMembers)
	}
	if err := c.checkTexts(file); err != nil {
		return err
	}
	names, err := checkFiles(file, c.Files)
	if err != nil {
		return err
	}
	if len(c.Sketches) > min(len(c.Files), MaxSketched) ||
		slices.ContainsFunc(c.Sketches, func(s []byte) bool { return len(s) > maxSketch }) {
		return wrong(file, "sketches", "%d of %d files, or one of more than %d bytes",
			len(c.Sketches), len(c.Files), maxSketch)
	}
	if !names[c.Graph] {
		return wrong(file, "graph", "%.80q is not one of the files", c.Graph)
	}
	graphs := make(map[string]bool)
	for i, m := range c.Members {
		if !names[m.Graph] || graphs[m.Graph] {
			return wrong(file, fmt.Sprintf("members[%d].graph", i), "%.80q is not one of the "+
				"files, "+
				"or of two members", m.Graph)
		}
		graphs[m.Graph] = true
	}
	if len(c.Members) > 0 && (c.Members[0].Graph != c.Graph ||
		c.Members[0].ModelDigest != c.ModelDigest) {
		return wrong(file, "members[0]", "it is not the model of the build")
	}
	return nil
}

func (c *Config) checkTexts(file string) error {
	texts := map[string]string{"model_name": c.ModelName, "ort_version": c.ORTVersion,
		"route": c.Route, "graph_optimization_level": c.Level}
	for i := range c.EPs {
		ep, at := &c.EPs[i], fmt.Sprintf("eps[%d].", i)
		for name, text := range map[string]string{"name": ep.Name, "version": ep.Version,
			"sdk_version": ep.SDKVersion, "hardware_architecture": ep.Hardware,
			"compatibility_string": ep.CompatibilityString, "driver_version": ep.DriverVersion,
			"devices": strings.Join(ep.Devices, "")} {
			texts[at+name] = text
		}
		if ep.Name == "" {
			return wrong(file, at+"name", "it is empty")
		}
	}
	for field, text := range texts {
		if len(text) > maxText || strings.ContainsFunc(text, unicode.IsControl) {
			return wrong(file, field, "%d bytes with control characters, or more than %d",
				len(text), maxText)
		}
	}
	return nil
}

func checkFiles(file string, files []File) (names map[string]bool, err error) {
	if len(files) == 0 || len(files) > MaxFiles {
		return nil, wrong(file, "files", "%d, not 1 to %d", len(files), MaxFiles)
	}
	names = make(map[string]bool)
	var total int64
	for i, f := range files {
		at := fmt.Sprintf("files[%d]", i)
		if why := BadName(f.Name); why != "" {
			return nil, wrong(file, at+".name", "%.80q: %s", f.Name, why)
		}
		if names[f.Name] {
			return nil, wrong(file, at+".name", "%q comes twice", f.Name)
		}
		names[f.Name] = true
		if total += f.Size; f.Size < 0 || total < 0 {
			return nil, wrong(file, at+".size", "%d", f.Size)
		}
	}
	return names, nil
}

// Size returns the sum of all files.
func (c *Config) Size() (total int64) {
	for _, f := range c.Files {
		total += f.Size
	}
	return total
}

// BadName returns what is wrong with the name of a file of a build, "" if nothing is.
func BadName(name string) string {
	switch {
	case name == "" || len(name) > maxName:
		return fmt.Sprintf("the name has %d bytes, not 1 to %d", len(name), maxName)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl):
		return "the name holds control characters or is not UTF-8"
	case strings.Contains(name, `\`) || path.Clean(name) != name || name == "." ||
		!filepath.IsLocal(name):
		return "not a clean relative name in one directory"
	case strings.Count(name, "/") >= maxDepth:
		return fmt.Sprintf("more than %d directories deep", maxDepth)
	}
	return ""
}
