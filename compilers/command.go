package compilers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	"github.com/epcached/epcached/compilers/dialogue"
)

// RouteCommand is the route of what a vendor's tool compiled.
const RouteCommand = "command"

// Command compiles the models of some EPs with vendors' own tools, and those of all others with ONNX Runtime. Tools run as workers do:
// in a process that the same worker program keeps to the same limits and files.
type Command struct {
	*ORT
	tools map[string]Tool // by EP
}

var (
	_ Compiler  = (*Command)(nil)
	_ Sandboxed = (*Command)(nil)
	_ Equipped  = (*Command)(nil)

	_ OutputVerifier = (*Command)(nil)
	_ Opener         = (*Command)(nil)
)

// Equipped is a Compiler with tools of its own.
type Equipped interface {
	// Equip gives a runtime as this compiler uses it: what it compiles with in place of an EP's library becomes a part of that library's
	// identity, and so of build keys.
	Equip(r Runtime) Runtime
}

// NewCommand adds tools to a compiler, which stays the caller's to close. The options that the tools' arguments name become known.
func NewCommand(o *ORT, tools []Tool) (*Command, error) {
	c := &Command{ORT: o, tools: map[string]Tool{}}
	for _, t := range tools {
		if err := t.Check(); err != nil {
			return nil, fmt.Errorf("compiler for %s: %w", t.EP, err)
		}
		if _, twice := c.tools[t.EP]; twice {
			return nil, fmt.Errorf("compiler for %s: there are two", t.EP)
		}
		c.tools[t.EP] = t
		t.makeKnown()
	}
	return c, nil
}

// makeKnown adds an EP of which nothing is known but the tool, with the options that its arguments name.
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
func (c *Command) Equip(r Runtime) Runtime {
	r.EPs = slices.Clone(r.EPs)
	for _, name := range slices.Sorted(maps.Keys(c.tools)) {
		t := c.tools[name]
		i := slices.IndexFunc(r.EPs, func(l EPLibrary) bool { return l.EP == name })
		switch {
		case i >= 0:
			l := r.EPs[i]
			l.Files, l.Tool = slices.Concat(l.Files, t.files()), t.identity()
			sort.Strings(l.Files)
			l.Files = slices.Compact(l.Files)
			r.EPs[i] = l
		case t.Alone:
			r.EPs = append(r.EPs, EPLibrary{EP: name, Path: t.Program, Files: t.files(), Tool: t.identity(), Absent: true})
		}
	}
	sort.Slice(r.EPs, func(i, j int) bool { return r.EPs[i].EP < r.EPs[j].EP })
	return r
}

// toolFor gives the tool for a job's EPs, false where ONNX Runtime compiles.
func (c *Command) toolFor(eps []EP) (Tool, bool, error) {
	for _, ep := range eps {
		t, ok := c.tools[ep.Name]
		switch {
		case ok && len(eps) > 1:
			return t, true, fmt.Errorf("%w: %s is compiled for with %s, which knows no other execution providers beside it", ErrOption, ep.Name, t.Program)
		case ok:
			return t, true, nil
		}
	}
	return Tool{}, false, nil
}

// TakesOpen implements Opener: tools may do what they like with the path that they are given.
func (c *Command) TakesOpen(job Job) bool {
	_, isTool, err := c.toolFor(job.EPs)
	return !isTool && err == nil && c.ORT.TakesOpen(job)
}

// loadable tells whether the EP of a tool has a library to load contexts with.
func (c *Command) loadable(r Runtime, ep EP) bool {
	t, isTool := c.tools[ep.Name]
	if !isTool {
		return true
	}
	path := ep.Library
	if l, err := r.Library(ep.Name); path == "" && err == nil {
		path = l.Path
	}
	return path != "" && path != t.Program
}

// Probe implements Compiler. An EP without a library, or without a device, has the one that its tool compiles for.
func (c *Command) Probe(ctx context.Context, r Runtime) (Facts, error) {
	plain := r
	plain.EPs = slices.DeleteFunc(slices.Clone(r.EPs), func(l EPLibrary) bool { return !c.loadable(r, EP{Name: l.EP, Library: l.Path}) })
	probed, err := c.ORT.Probe(ctx, plain)
	if err != nil {
		return Facts{}, err
	}
	if err := ctx.Err(); err != nil {
		return Facts{}, err
	}
	facts := probed
	facts.EPs = nil
	for _, l := range r.EPs {
		p := EPProbe{Name: l.EP, Library: l.Path}
		if i := slices.IndexFunc(probed.EPs, func(p EPProbe) bool { return p.Name == l.EP }); i >= 0 {
			p = probed.EPs[i]
		}
		if t, isTool := c.tools[l.EP]; isTool && p.Error == "" && len(p.Devices) == 0 {
			p.Devices = []DeviceFacts{t.device()}
		}
		facts.EPs = append(facts.EPs, p)
	}
	return facts, nil
}

// Compile implements Compiler.
func (c *Command) Compile(ctx context.Context, job Job, progress func(phase string)) (Result, error) {
	t, isTool, err := c.toolFor(job.EPs)
	if !isTool {
		return c.ORT.Compile(ctx, job, progress)
	}
	if err == nil {
		err = t.refuse(job)
	}
	if err != nil {
		return Result{}, err
	}
	return c.compile(ctx, t, job, progress)
}

func (c *Command) compile(ctx context.Context, t Tool, job Job, progress func(phase string)) (Result, error) {
	if !filepath.IsAbs(job.Model) || !filepath.IsAbs(job.Folder) || job.Output == "" || job.Output != filepath.Base(job.Output) {
		return Result{}, fmt.Errorf("compile %q to %q in %q: paths must be absolute, and the output a file's name", job.Model, job.Output, job.Folder)
	}
	before, err := c.handOver(job.Folder)
	if err != nil {
		return Result{}, err
	}
	req := t.request()
	req.Model, req.Output = job.Model, filepath.Join(job.Folder, job.Output)
	req.Fill = func(model string) []string { return t.arguments(job, model) }
	done, err := c.work(ctx, req, job.Folder, job.Pace, progress)
	result := Result{Log: done.log, CPUSeconds: done.cpu}
	if err != nil {
		return result, fmt.Errorf("%q: %w", filepath.Base(job.Model), t.said(err, done.log))
	}
	files, _, err := Collect(ctx, job.Folder, job.Output, before, c.opts.Limits)
	if err != nil {
		var none *NoNodesError
		if errors.As(err, &none) {
			none.EPs, none.Log = epNames(job.EPs), done.log
		}
		return result, err
	}
	if err := c.takeBack(job.Folder, files); err != nil {
		return result, err
	}
	result.Graph, result.Graphs, result.Files, result.Seconds = job.Output, []string{job.Output}, files, done.Seconds
	result.ORTVersion, result.Route, result.MaxRSS = job.Runtime.ORTVersion, RouteCommand, done.PeakMemory
	result.EPs = []EPUsed{{Name: t.EP, Devices: []DeviceFacts{t.device()}}}
	return result, nil
}

// request is what is the same of every run of the tool.
func (t Tool) request() dialogue.Request {
	return dialogue.Request{Do: dialogue.Command, EPs: []dialogue.EP{{Name: t.EP}}, Readable: t.files(), Read: t.Read}
}

// said adds a tool's own last words to its refusal.
func (t Tool) said(err error, log string) error {
	var refused *RefusedError
	if line := LastLine(log); line != "" && errors.As(err, &refused) {
		refused.Text += ": " + line
	}
	return err
}

// Fingerprint implements Compiler.
func (c *Command) Fingerprint(ctx context.Context, r Runtime, eps []EP, own *Job) ([]Fingerprint, error) {
	var prints []Fingerprint
	for _, ep := range eps {
		one, err := c.fingerprintOf(ctx, r, ep, own)
		if err != nil {
			return nil, err
		}
		prints = append(prints, one)
	}
	return prints, nil
}

func (c *Command) fingerprintOf(ctx context.Context, r Runtime, ep EP, own *Job) (Fingerprint, error) {
	t, isTool := c.tools[ep.Name]
	if !isTool {
		prints, err := c.ORT.Fingerprint(ctx, r, []EP{ep}, own)
		if err != nil {
			return Fingerprint{}, err
		}
		return prints[0], nil
	}
	print, err := c.toolFingerprint(ctx, t, probeJob(r, ep, ""), own)
	if err != nil {
		return Fingerprint{}, fmt.Errorf("fingerprint of %s with %s: %w", t.EP, t.Program, err)
	}
	return print, nil
}

func (c *Command) toolFingerprint(ctx context.Context, t Tool, job Job, own *Job) (Fingerprint, error) {
	version, err := c.version(ctx, t)
	if err != nil {
		return Fingerprint{}, err
	}
	folder, err := c.scratch()
	if err != nil {
		return Fingerprint{}, err
	}
	defer c.drop(folder)
	job.Folder = folder
	compile := func(ctx context.Context, job Job) (Result, error) {
		if err := t.refuse(job); err != nil {
			return Result{}, err
		}
		return c.compile(ctx, t, job, nil)
	}
	job, done, err := smallestTaken(ctx, compile, job, own)
	if err != nil {
		return Fingerprint{}, err
	}
	print, err := fingerprintOf(ctx, job, done)
	if err != nil {
		return Fingerprint{}, err
	}
	print.EPVersion, print.Device, print.Devices = version, t.device(), []DeviceFacts{t.device()}
	if print.SDKVersion == "" {
		print.SDKVersion = version
	}
	return print, nil
}

// version is the first line that the tool prints when it is asked for it.
func (c *Command) version(ctx context.Context, t Tool) (string, error) {
	if len(t.Version) == 0 {
		return "", nil
	}
	req := t.request()
	req.Args, req.Tell = append([]string{t.Program}, t.Version...), true
	done, err := c.scratchJob(ctx, req, Pace{})
	if err != nil {
		return "", fmt.Errorf("version: %w", t.said(err, done.log))
	}
	line, _, _ := strings.Cut(strings.TrimSpace(done.Printed), "\n")
	return strings.ToValidUTF8(strings.TrimSpace(line[:min(len(line), 200)]), ""), nil
}

// Check implements Compiler. Where there is no library to load with it cannot be checked.
func (c *Command) Check(ctx context.Context, job CheckJob) (CheckResult, error) {
	for _, ep := range job.EPs {
		if !c.loadable(job.Runtime, ep) {
			return CheckResult{Outcome: NotCheckable, Text: "the library of " + ep.Name + " is not here: what its compiler makes is loaded by applications alone"}, ctx.Err()
		}
	}
	result, err := c.ORT.Check(ctx, job)
	if _, isTool, _ := c.toolFor(job.EPs); isTool && err == nil && result.Outcome == Failed && result.absent {
		result.Outcome = NotCheckable
	}
	return result, err
}

// Compatibility implements Compiler. Without a library nobody can say.
func (c *Command) Compatibility(ctx context.Context, r Runtime, ep EP, infos []string) ([]Verdict, error) {
	if !c.loadable(r, ep) {
		return make([]Verdict, len(infos)), ctx.Err()
	}
	return c.ORT.Compatibility(ctx, r, ep, infos)
}

// VerifyOutput implements OutputVerifier. Where there is no library to load with nothing can be compared.
func (c *Command) VerifyOutput(ctx context.Context, job VerifyJob) (VerifyResult, error) {
	for _, ep := range job.EPs {
		if !c.loadable(job.Runtime, ep) {
			return VerifyResult{Outcome: NotCheckable, Text: "the library of " + ep.Name + " is not here"}, ctx.Err()
		}
	}
	return c.ORT.VerifyOutput(ctx, job)
}
