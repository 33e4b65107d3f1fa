package compilers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/epcached/epcached/compilers/dialogue"
)

// RouteCommand is the route of what a vendor's tool compiled.
const RouteCommand = "command"

// Equipped is a Compiler with tools of its own.
type Equipped interface {
	// Equip gives a runtime as this compiler uses it: what it compiles with in place of an EP's library becomes a part of that library's
	// identity, and so of build keys.
	Equip(r Runtime) Runtime
}

// AddTools has the models of some EPs compiled with vendors' own tools, and no longer with ONNX
// Runtime. Tools run as workers do: in a process that the same worker program keeps to the same
// limits and files. The options that the tools' arguments name become known. It comes before the
// first use of the compiler.
func (o *ORT) AddTools(tools []Tool) error {
	for _, t := range tools {
		if err := t.Check(); err != nil {
			return fmt.Errorf("compiler for %s: %w", t.EP, err)
		}
		if _, twice := o.tools[t.EP]; twice {
			return fmt.Errorf("compiler for %s: there are two", t.EP)
		}
		o.tools[t.EP] = t
		t.makeKnown()
	}
	return nil
}

func (t Tool) makeKnown() {
	info := EPInfo{Name: t.EP, Options: map[string]EPOption{}}
	for _, arg := range t.Args {
		for _, m := range placeholder.FindAllStringSubmatch(arg, -1) {
			if m[1] == "option" {
				info.Options[m[2]] = EPOption{Policy: Allowed, Kind: "string"}
			}
		}
	}
	info.FingerprintOptions = slices.Sorted(maps.Keys(info.Options))
	epTable.Lock()
	defer epTable.Unlock()
	if old, known := epTable.eps[t.EP]; !known || len(old.Libraries) == 0 {
		epTable.eps[t.EP] = info
	}
}

// Equip implements Equipped.
func (o *ORT) Equip(r Runtime) Runtime {
	r.EPs = slices.Clone(r.EPs)
	for _, name := range slices.Sorted(maps.Keys(o.tools)) {
		t := o.tools[name]
		i := slices.IndexFunc(r.EPs, func(l EPLibrary) bool { return l.EP == name })
		switch {
		case i >= 0:
			l := &r.EPs[i]
			l.Files, l.Tool = slices.Concat(l.Files, t.files()), t.identity()
			slices.Sort(l.Files)
			l.Files = slices.Compact(l.Files)
		case t.Alone:
			r.EPs = append(r.EPs, EPLibrary{EP: name, Path: t.Program, Files: t.files(), Tool: t.identity(), Absent: true})
		}
	}
	sortEPs(r.EPs)
	return r
}

// toolFor gives the tool for a job's EPs, false where ONNX Runtime compiles.
func (o *ORT) toolFor(eps []EP) (Tool, bool, error) {
	for _, ep := range eps {
		t, ok := o.tools[ep.Name]
		switch {
		case ok && len(eps) > 1:
			return t, true, fmt.Errorf("%w: %s is compiled for with %s, which knows no other execution providers beside it", ErrOption, ep.Name, t.Program)
		case ok:
			return t, true, nil
		}
	}
	return Tool{}, false, nil
}

// loadable tells whether the EP of a tool has a library to load contexts with.
func (o *ORT) loadable(r Runtime, ep EP) bool {
	t, isTool := o.tools[ep.Name]
	if !isTool {
		return true
	}
	path := ep.Library
	if l, err := r.Library(ep.Name); path == "" && err == nil {
		path = l.Path
	}
	return path != "" && path != t.Program
}

// unloadable says why what is compiled for the EPs does not load on this machine, "" where it may:
// an EP of a tool has no library here, or builds with one of the options do not even fail in an
// orderly way where their device is absent.
func (o *ORT) unloadable(r Runtime, eps []EP) string {
	for _, ep := range eps {
		if !o.loadable(r, ep) {
			return "the library of " + ep.Name + " is not here: what its compiler makes is loaded by applications alone"
		}
	}
	for _, ep := range eps {
		info, _ := EPByName(ep.Name)
		for name, value := range ep.Options {
			if info.Options[name].Unchecked && value == "1" && targetAbsent(nil, []EP{ep}) {
				return "builds with " + name + "=" + value + " do not load where the device that they are for is absent"
			}
		}
	}
	return ""
}

func (t Tool) compileRequest(job Job) (dialogue.Request, error) {
	req := t.request()
	req.Model, req.Output = job.Model, filepath.Join(job.Folder, job.Output)
	req.Route = RouteCommand
	req.Fill = func(model string) []string { return t.arguments(job, model) }
	return req, t.refuse(job)
}

// request is what is the same of every run of the tool.
func (t Tool) request() dialogue.Request {
	return dialogue.Request{Do: dialogue.Command, EPs: []EP{{Name: t.EP}}, Readable: t.files(), Read: t.Read}
}

// said adds a tool's own last words to its refusal.
func (t Tool) said(err error, log string) error {
	var refused *RefusedError
	if line := LastLine(log); line != "" && errors.As(err, &refused) {
		refused.Text += ": " + line
	}
	return err
}

func (o *ORT) version(ctx context.Context, t Tool) (string, error) {
	if len(t.Version) == 0 {
		return "", nil
	}
	req := t.request()
	req.Args, req.Tell = append([]string{t.Program}, t.Version...), true
	done, err := o.scratchJob(ctx, req, Pace{}, nil)
	if err != nil {
		return "", fmt.Errorf("version: %w", t.said(err, done.log))
	}
	line, _, _ := strings.Cut(strings.TrimSpace(done.Printed), "\n")
	return strings.ToValidUTF8(strings.TrimSpace(line[:min(len(line), 200)]), ""), nil
}
