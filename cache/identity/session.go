package identity

import (
	"bytes"
	_ "embed"
	"fmt"
	"maps"
	"slices"

	"github.com/pelletier/go-toml/v2"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/suggest"
)

//go:embed session.toml
var sessionData []byte

// sessionClass says what a session config entry means, in the words of session.toml.
type sessionClass string

const (
	classCompile sessionClass = "compile"
	classRun     sessionClass = "run"
	classServe   sessionClass = "serve"
	classFolder  sessionClass = "folder"
	classRefused sessionClass = "refused"
)

// onlyOptimal, set to "1", has ONNX Runtime fail on a model that the EP would rather recompile.
const onlyOptimal = "session.fail_on_suboptimal_compiled_model"

type sessionRule struct {
	Class   sessionClass `toml:"-"`
	Kind    string       `toml:"kind"`
	Default string       `toml:"default"`
	Because string       `toml:"-"` // of those that are refused
}

var sessionKeys = mustParseSession(sessionData)

func mustParseSession(data []byte) map[string]sessionRule {
	table, err := parseSession(data)
	if err != nil {
		panic(err)
	}
	return table
}

func parseSession(data []byte) (map[string]sessionRule, error) {
	var file struct {
		Run     []string
		Serve   []string
		Folder  []string
		Compile map[string]sessionRule
		Refused map[string]string
	}
	if err := toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields().Decode(&file); err != nil {
		return nil, fmt.Errorf("session config entries: %w", err)
	}
	table := make(map[string]sessionRule)
	var twice error
	add := func(key string, rule sessionRule) {
		if _, there := table[key]; there {
			twice = fmt.Errorf("session config entries: %q is listed twice", key)
		}
		table[key] = rule
	}
	for class, keys := range map[sessionClass][]string{
		classRun: file.Run, classServe: file.Serve, classFolder: file.Folder,
	} {
		for _, key := range keys {
			add(key, sessionRule{Class: class})
		}
	}
	for key, rule := range file.Compile {
		rule.Class = classCompile
		add(key, rule)
	}
	for key, because := range file.Refused {
		add(key, sessionRule{Class: classRefused, Because: because})
	}
	return table, twice
}

// SplitSession returns those session config entries that a compile is given, and whether the
// request takes optimal builds only, without those of running. Record says what is wrong with one.
func SplitSession(entries map[string]string) (compile map[string]string, optimal bool) {
	compile = entries
	for key, value := range entries {
		class := sessionKeys[key].Class
		if class != classRun && class != classServe {
			continue
		}
		if len(compile) == len(entries) {
			compile = maps.Clone(entries)
		}
		delete(compile, key)
		optimal = optimal || key == onlyOptimal && value == "1" // as ONNX Runtime compares it
	}
	return compile, optimal
}

// ExternalFolder returns the entries that a client sends, and the folder that the others name for
// external data, "" for none: the client opens the files there.
func ExternalFolder(entries map[string]string) (sent map[string]string, folder string) {
	sent = maps.Clone(entries)
	maps.DeleteFunc(sent, func(key, value string) bool {
		if sessionKeys[key].Class != classFolder {
			return false
		}
		folder = value
		return true
	})
	return sent, folder
}

// canonicalSession gives the session config entries as they count for identity.
func (a Allowed) canonicalSession(entries map[string]string) (map[string]string, error) {
	out := make(map[string]string, len(entries))
	for _, key := range slices.Sorted(maps.Keys(entries)) {
		rule, known := sessionKeys[key]
		if !known {
			if !slices.Contains(a, "session/"+key) {
				return nil, unknownEntry(key)
			}
			out[key] = entries[key]
			continue
		}
		switch rule.Class {
		case classRun, classServe:
			continue
		case classFolder:
			return nil, apierr.New(apierr.NotAllowed, nil, "session option %q is not taken from clients: it names a folder", key).
				WithHint("send external data as descriptors")
		case classRefused:
			return nil, apierr.New(apierr.NotAllowed, nil, "session option %q is not taken from clients: %s", key, rule.Because)
		}
		v, err := compilers.CanonicalValue(rule.Kind, entries[key])
		if err != nil {
			return nil, apierr.New(apierr.BadRequest, err, "session option %q", key)
		}
		if v != rule.Default {
			out[key] = v
		}
	}
	return out, nil
}

func unknownEntry(key string) error {
	e := apierr.New(apierr.BadRequest, nil, "session option %q is not known", key)
	if near := suggest.Closest(key, maps.Keys(sessionKeys)); near != "" {
		return e.WithHint("did you mean %q?", near)
	}
	return e.WithHint("the administrator can allow it: allow_options = [%q]", "session/"+key)
}
