package config

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/suggest"
	"github.com/epcached/epcached/internal/tomlfile"
	"github.com/epcached/epcached/remote"
)

// Check validates a [[runtime]] as a whole.
func (r *Runtime) Check(v tomlfile.Value) {
	dir, library, libraries := v.Has("directory"), v.Has("ort_library"), v.In("ep_libraries")
	switch {
	case dir == library:
		v.Errorf("give either directory, or ort_library and ep_libraries")
	case dir && len(libraries.Keys()) > 0:
		libraries.Errorf("ep_libraries need ort_library; in a directory they are found")
	case library && len(libraries.Keys()) == 0:
		v.In("ort_library").Errorf("ort_library needs ep_libraries")
	}
}

// Check validates a [[driver]] as a whole.
func (d *Driver) Check(v tomlfile.Value) {
	given := 0
	for _, name := range []string{"file", "command"} {
		if v.Has(name) {
			given++
		}
	}
	if given != 1 {
		v.Errorf("give either file or command")
	}
	command := v.In("command")
	if _, ok := command.Raw.([]any); ok && (len(d.Command) == 0 || d.Command[0] == "") {
		command.Errorf("no program named")
	}
	if len(d.Command) > 0 && strings.Contains(d.Command[0], "/") {
		d.Command[0] = v.Absolute(d.Command[0])
	}
}

// Decode reads the policy for all execution providers, and those for each, which inherit from it.
func (p *Policies) Decode(v tomlfile.Value) {
	var file struct {
		Policy
		ByEP map[string]tomlfile.Value `toml:"*"`
	}
	file.Policy = (*p)[""]
	v.Into(&file)
	(*p)[""] = file.Policy
	for _, ep := range slices.Sorted(maps.Keys(file.ByEP)) {
		inner := file.ByEP[ep]
		if err := checkEP(ep); err != nil {
			inner.Errorf("%v", err)
		}
		one := file.Policy
		inner.Into(&one)
		(*p)[ep] = one
	}
}

// Decode reads each remote over the defaults.
func (r *Remotes) Decode(v tomlfile.Value) {
	*r = make(Remotes)
	var tables map[string]tomlfile.Value
	if v.Raw != nil {
		v.Into(&tables)
	}
	for _, name := range slices.Sorted(maps.Keys(tables)) {
		one := Remote{Publish: "never", Ask: "always", Lease: true}
		table := tables[name]
		checkThreshold(table)
		table.Into(&one)
		if c := one.Config(name); one.URL != "" {
			if err := c.Check(); err != nil {
				table.Errorf("%v", err)
			}
		}
		if one.Ask == "always" && len(one.Trust) == 0 {
			table.Errorf(
				"no key is trusted: give trust, the files with public keys; or ask = \"never\"")
		}
		(*r)[name] = one
	}
}

// Config converts the remote for package remote.
func (r Remote) Config(name string) remote.Config {
	return remote.Config{Name: name, URL: r.URL, Region: r.Region, Endpoint: r.Endpoint,
		Rate: amount(r.Rate).Bytes}
}

// checkEP finds a misspelled execution provider. Plugins may register under any name, so an unknown
// name is accepted if it has the usual syntax and is not similar to a known one.
func checkEP(name string) error {
	names := compilers.EPNames()
	like := suggest.Closest(name, slices.Values(names))
	if i := slices.IndexFunc(names, func(n string) bool {
		return strings.EqualFold(n, name)
	}); i >= 0 {
		like = names[i]
	}
	switch {
	case slices.Contains(names, name):
		return nil
	case like != "":
		return fmt.Errorf("unknown execution provider %q; did you mean %q?", name, like)
	case !strings.HasSuffix(name, "ExecutionProvider"):
		return fmt.Errorf("unknown field or execution provider %q", name)
	}
	return nil
}

// Check completes a [[compiler]], and validates its program.
func (c *Compiler) Check(v tomlfile.Value) {
	c.Device = cmp.Or(c.Device, "NPU")
	switch {
	case !v.Has("ep"):
	case len(c.Command) == 0 || c.Command[0] == "":
		v.In("command").Errorf("no program named")
	case c.EP != "":
		c.Command[0] = v.Absolute(c.Command[0])
		if err := c.Tool().Check(); err != nil {
			v.In("command").Errorf("%v", err)
		}
	}
}

// Tool converts the compiler for package compilers.
func (c *Compiler) Tool() compilers.Tool {
	return compilers.Tool{EP: c.EP, Program: c.Command[0], Args: c.Command[1:], Version: c.Version,
		Files: c.Files, Read: c.Read, Device: c.Device, Alone: c.Alone}
}

// Check records an error for an execution provider with two compilers, and for several signatures.
func (s *Settings) Check(v tomlfile.Value) {
	checkThreshold(v)
	seen := map[string]bool{}
	for i, c := range s.Compilers {
		if seen[c.EP] {
			v.In("compiler", strconv.Itoa(i)).Errorf("%s has a compiler already", c.EP)
		}
		seen[c.EP] = true
	}
}
