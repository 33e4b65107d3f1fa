//go:build linux && (amd64 || arm64)

package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/workerproto"
)

// guideline is a row: what is to hold, and the calls that prove it.
type guideline struct {
	name  string
	level string
	page  string // "": the section's
	bare  bool   // the library is not registered yet when it begins
	prove func(c *testCase)
}

var (
	required    = level(Required)
	recommended = level(Recommended)
	optional    = level(Optional)
)

func level(level string) func(name string, prove func(c *testCase)) guideline {
	return func(name string, prove func(c *testCase)) guideline {
		return guideline{name: name, level: level, prove: prove}
	}
}

func (g guideline) on(page string) guideline {
	g.page = page
	return g
}

func (g guideline) unregistered() guideline {
	g.bare = true
	return g
}

type section struct {
	name, page string
	rows       []guideline
}

// The pages that the guidelines are from.
const (
	designPage      = "https://onnxruntime.ai/docs/execution-providers/EP-Context-Design.html"
	developmentPage = "https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/development.html"
	usagePage       = "https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/usage.html"
)

func sections() []section {
	return []section{
		{"plugin library", developmentPage, pluginLibrary},
		{"generation", designPage, generation},
		{"inference", designPage, inference},
		{"compatibility", developmentPage, compatibility},
		{"weight sharing", designPage, sharing},
	}
}

// guidelines lists all guidelines, in the order of the report.
func guidelines() []Guideline {
	var list []Guideline
	for _, s := range sections() {
		for _, g := range s.rows {
			list = append(list, s.describe(g))
		}
	}
	return list
}

func (s section) describe(g guideline) Guideline {
	return Guideline{Section: s.name, Name: g.name, Page: cmp.Or(g.page, s.page),
		Level: g.level}
}

// subject is an EP to examine. The library is registered by discover and prove.
type subject struct {
	ep     workerproto.EP // Name may be empty for discover
	dir    string         // private, exists, and is empty
	report func(call string) error
}

// discover registers the library, and finds out what its EP is called and which models it takes.
func discover(env *ort.Env, s *subject) (devices []ort.Device, family string, err error) {
	before, err := env.Devices()
	if err != nil {
		return nil, "", err
	}
	if err := env.Register(cmp.Or(s.ep.Name, "epcached_conformance"), s.ep.Library); err != nil {
		return nil, "", fmt.Errorf("register %q: %w", s.ep.Library, err)
	}
	all, err := env.Devices()
	if err != nil {
		return nil, "", err
	}
	for _, d := range all {
		known := slices.ContainsFunc(before, func(b ort.Device) bool { return b.EP == d.EP })
		if s.ep.Name == "" && !known {
			s.ep.Name = d.EP
		}
		if d.EP == s.ep.Name {
			devices = append(devices, d)
		}
	}
	if s.ep.Name == "" {
		return nil, "", errors.New("the library lists no device on this machine")
	}
	if devices, err = choose(s.ep, devices); err != nil {
		return nil, "", err
	}
	var first error
	for i, f := range families() {
		c := newCase(env, *s, f, fmt.Sprintf("%s/%d", s.dir, i))
		c.devices = devices
		_, failed := c.prove(func(c *testCase) {
			c.compile(c.write("m.onnx", c.source), nil)
			c.contexts("m_ctx.onnx")
		})
		if failed == nil {
			return devices, f.String(), nil
		}
		first = cmp.Or(first, failed)
	}
	return devices, "", fmt.Errorf("%s makes an EPContext model of none of the models "+
		"that were tried: %w", s.ep.Name, first)
}

func newCase(env *ort.Env, s subject, f family, dir string) *testCase {
	return &testCase{env: env, ep: s.ep, family: f, source: f.model(1, 1, false), dir: dir,
		report: s.report}
}

// prove proves the guideline "SECTION/NAME".
func prove(env *ort.Env, s subject, name, familyName string) (Finding, error) {
	all := families()
	i := slices.IndexFunc(all, func(f family) bool { return f.String() == familyName })
	if i < 0 {
		return Finding{}, fmt.Errorf("there are no models of %q", familyName)
	}
	for _, section := range sections() {
		for _, g := range section.rows {
			if section.name+"/"+g.name == name {
				finding, err := newCase(env, s, all[i], s.dir).run(s, g)
				finding.Guideline = section.describe(g)
				return finding, err
			}
		}
	}
	return Finding{}, fmt.Errorf("there is no guideline %q", name)
}

func (c *testCase) run(s subject, g guideline) (Finding, error) {
	if !g.bare {
		if err := c.env.Register(s.ep.Name, s.ep.Library); err != nil {
			return Finding{}, fmt.Errorf("register %q: %w", s.ep.Library, err)
		}
		listed, err := c.env.DevicesOf(s.ep.Name)
		if err != nil {
			return Finding{}, err
		}
		if c.devices, err = choose(s.ep, listed); err != nil {
			return Finding{}, err
		}
	}
	notApplicable, err := c.prove(g.prove)
	out := Finding{Outcome: Holds, Reason: notApplicable, Calls: c.calls}
	switch {
	case notApplicable != "":
		out.Outcome = NotApplicable
	case err != nil:
		out.Outcome = Broken
	}
	return out, nil
}

// prove runs a row until it stops. It gives the last call's error, or why it is not applicable.
func (c *testCase) prove(row func(c *testCase)) (notApplicable string, err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case stopped:
			if notApplicable = r.notApplicable; notApplicable == "" {
				last := c.calls[len(c.calls)-1]
				err = fmt.Errorf("%s: %s", last.Call, last.Happened)
			}
		default:
			panic(r)
		}
	}()
	row(c)
	return "", nil
}
