package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/spelling"
)

func (r *Runtime) read(t *table) {
	t.file("directory", &r.Directory)
	t.file("ort_library", &r.ORTLibrary)
	libraries := t.table("ep_libraries")
	for _, ep := range slices.Sorted(maps.Keys(libraries.values)) {
		var path string
		libraries.file(ep, &path)
		if r.EPLibraries == nil {
			r.EPLibraries = map[string]string{}
		}
		r.EPLibraries[ep] = path
	}
	_, folder := t.values["directory"]
	_, library := t.values["ort_library"]
	switch {
	case folder == library:
		t.wrong("give either directory, or ort_library and ep_libraries")
	case folder && len(libraries.values) > 0:
		t.wrong("ep_libraries go with ort_library: in a directory they are found", "ep_libraries")
	case library && len(libraries.values) == 0:
		t.wrong("ort_library needs ep_libraries", "ort_library")
	}
	t.done()
}

func (d *Driver) read(t *table) {
	t.text("ep", &d.EP, checkEP)
	t.file("file", &d.File)
	t.text("module", &d.Module, checkModule)
	t.texts("command", &d.Command, nil)
	given := 0
	for _, name := range []string{"file", "module", "command"} {
		if _, there := t.values[name]; there {
			given++
		}
	}
	if given != 1 {
		t.wrong("give one of file, module and command")
	}
	if command, there := t.values["command"].([]any); there && (len(command) == 0 || command[0] == "") {
		t.wrong("it names no program", "command")
	}
	if len(d.Command) > 0 && strings.Contains(d.Command[0], "/") {
		d.Command[0] = t.document.Absolute(d.Command[0])
	}
	t.done()
}

// readPolicies reads the policy for all execution providers and, over it, those for each: what they do not say they inherit.
func (s *Settings) readPolicies(t *table) {
	common := s.Policies[""]
	common.read(t)
	s.Policies[""] = common
	names := slices.Sorted(maps.Keys(t.values))
	for _, ep := range names {
		if _, isTable := t.values[ep].(map[string]any); !isTable || t.taken[ep] {
			continue
		}
		inner := t.table(ep)
		if err := checkEP(ep); err != nil {
			t.wrong(err.Error(), ep)
		}
		one := common
		one.read(inner)
		inner.done()
		s.Policies[ep] = one
		s.inherit(inner)
	}
	t.done()
}

func (p *Policy) read(t *table) {
	t.choice("unknown", &p.Unknown, "load_check", "serve", "refuse")
	t.choice("prefer_recompilation", &p.PreferRecompilation, "serve_and_refresh", "serve", "refuse")
	t.choice("unsupported", &p.Unsupported, "recompile", "fail")
	t.text("max_age", &p.MaxAge, checkDuration)
	t.number("min_compile_seconds", &p.MinCompileSeconds, 0, 365*86400)
	t.truth("measure_gain", &p.MeasureGain)
}

// checkEP finds a misspelled execution provider. Plugins may register under any name, so that an unknown one is believed if it looks like one and is
// not nearly one that is known.
func checkEP(name string) error {
	names := compilers.EPNames()
	if slices.Contains(names, name) {
		return nil
	}
	for _, n := range names {
		if strings.EqualFold(n, name) {
			return fmt.Errorf("there is no execution provider %q; is it %q?", name, n)
		}
	}
	if like := spelling.Closest(name, slices.Values(names)); like != "" {
		return fmt.Errorf("there is no execution provider %q; is it %q?", name, like)
	}
	if !strings.HasSuffix(name, "ExecutionProvider") {
		return fmt.Errorf("there is no field and no execution provider %q", name)
	}
	return nil
}
