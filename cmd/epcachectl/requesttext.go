package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
)

// flags spells the request as on a command line, with a space behind each flag.
func (r *request) flags() string {
	text := ""
	for _, ep := range r.eps {
		text += "--ep " + term.Printable(ep.GetName())
		if len(ep.GetDevices()) > 0 {
			device := ep.GetDevices()[0]
			text += ":" + term.Printable(device.GetType())
			for _, key := range slices.Sorted(maps.Keys(device.GetMetadata())) {
				text += "," + term.Printable(term.Brief(key+"="+device.GetMetadata()[key]))
			}
		}
		text += " "
		for _, option := range slices.Sorted(maps.Keys(ep.GetOptions())) {
			text += "--option " + term.Printable(term.Brief(option+"="+ep.GetOptions()[option])) + " "
		}
	}
	add := func(flag, value string) {
		if value != "" {
			text += flag + " " + term.Printable(term.Brief(value)) + " "
		}
	}
	for _, key := range slices.Sorted(maps.Keys(r.sessionOptions)) {
		add("--session-option", key+"="+r.sessionOptions[key])
	}
	for _, name := range slices.Sorted(maps.Keys(r.dims)) {
		add("--dim", fmt.Sprintf("%s=%d", name, r.dims[name]))
	}
	for _, name := range slices.Sorted(maps.Keys(r.denotations)) {
		add("--dim-by-denotation", fmt.Sprintf("%s=%d", name, r.denotations[name]))
	}
	add("--runtime", r.runtime)
	add("--optimization-level", r.level)
	add("--route", r.route)
	add("--store", r.store)
	add("--initializers-file", r.output.GetExternalInitializersFile())
	if n := r.output.GetExternalInitializersThreshold(); n != 0 {
		add("--initializers-threshold", strconv.FormatInt(n, 10))
	}
	add("--node-name-prefix", r.output.GetNodeNamePrefix())
	if r.verify != 0 {
		add("--verify-output", strconv.FormatFloat(r.verify, 'g', -1, 64))
	}
	return text + r.switches()
}

// switches spells the flags without a value.
func (r *request) switches() string {
	text := ""
	for _, s := range []struct {
		on   bool
		flag string
	}{
		{r.embed, "--embed "}, {r.strictORT, "--strict-ort "}, {r.output.GetKeepInitializersInSource(), "--keep-initializers "}, {r.output.GetComplete(), "--complete "},
	} {
		if s.on {
			text += s.flag
		}
	}
	return text
}
