//go:build linux && (amd64 || arm64)

package conformance

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/epcached/epcached/compilers/dialogue"
	"github.com/epcached/epcached/compilers/ort"
)

// guideline is a row: what is to hold, and the calls that prove it.
type guideline struct {
	name  string
	level string
	page  string
	bare  bool // the library is not registered yet when it begins
	prove func(c *testCase)
}

// section is a part of the report.
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
	return []section{{"plugin library", developmentPage, pluginLibrary}, {"generation", designPage,
		generation},
		{"inference", designPage, inference}, {"compatibility", developmentPage,
			compatibility}, {"weight sharing", designPage, sharing}}
}

// List lists all guidelines, in the order of the report.
func List() []dialogue.Guideline {
	var list []dialogue.Guideline
	for _, s := range sections() {
		for _, g := range s.rows {
			list = append(list, dialogue.Guideline{Section: s.name, Name: g.name,
				Page: cmp.Or(g.page, s.page), Level: cmp.Or(g.level, dialogue.Required)})
		}
	}
	return list
}

// Subject is an EP to examine. The library is registered by Discover and Run.
type Subject struct {
	EP     dialogue.EP // Name may be empty for Discover
	Choose func(ep dialogue.EP, devices []ort.Device) ([]ort.Device, error)
	Folder string // private, exists, and is empty
	Tell   func(call string) error
}

// Discover registers the library, and finds out what its EP is called and which models it takes.
func Discover(env *ort.Env, s *Subject) (devices []ort.Device, family string, err error) {
	before, err := env.Devices()
	if err != nil {
		return nil, "", err
	}
	if err := env.Register(cmp.Or(s.EP.Name, "epcached_conformance"), s.EP.Library); err != nil {
		return nil, "", fmt.Errorf("register %q: %w", s.EP.Library, err)
	}
	all, err := env.Devices()
	if err != nil {
		return nil, "", err
	}
	for _, d := range all {
		known := slices.ContainsFunc(before, func(b ort.Device) bool { return b.EP == d.EP })
		if s.EP.Name == "" && !known {
			s.EP.Name = d.EP
		}
		if d.EP == s.EP.Name {
			devices = append(devices, d)
		}
	}
	if s.EP.Name == "" {
		return nil, "", errors.New("the library lists no device on this machine")
	}
	if devices, err = s.Choose(s.EP, devices); err != nil {
		return nil, "", err
	}
	var first error
	for i, f := range families() {
		c := &testCase{env: env, ep: s.EP, devices: devices, family: f,
			folder: fmt.Sprintf("%s/%d", s.Folder, i), tell: s.Tell}
		_, failed := c.prove(func(c *testCase) {
			c.compile(c.write("m.onnx", f.model(1, 1, false)), nil)
			c.contexts("m_ctx.onnx")
		})
		if failed == nil {
			return devices, f.String(), nil
		}
		first = cmp.Or(first, failed)
	}
	return devices, "", fmt.Errorf("%s makes an EPContext model of none of the models "+
		"that were tried: %w", s.EP.Name, first)
}

// Run proves the guideline "SECTION/NAME".
func Run(env *ort.Env, s Subject, guideline, familyName string) (dialogue.Finding, error) {
	f, err := familyNamed(familyName)
	if err != nil {
		return dialogue.Finding{}, err
	}
	rows := List()
	i := slices.IndexFunc(rows,
		func(g dialogue.Guideline) bool { return g.Section+"/"+g.Name == guideline })
	if i < 0 {
		return dialogue.Finding{}, fmt.Errorf("there is no guideline %q", guideline)
	}
	g := rowAt(i)
	c := &testCase{env: env, ep: s.EP, family: f, folder: s.Folder, tell: s.Tell}
	if !g.bare {
		if err := c.register(s); err != nil {
			return dialogue.Finding{}, err
		}
	}
	notApplicable, err := c.prove(g.prove)
	out := dialogue.Finding{Guideline: rows[i], Outcome: dialogue.Holds, Reason: notApplicable,
		Calls: c.calls}
	switch {
	case notApplicable != "":
		out.Outcome = dialogue.NotApplicable
	case err != nil:
		out.Outcome = dialogue.Broken
	}
	return out, nil
}

func rowAt(i int) guideline {
	for _, s := range sections() {
		if i < len(s.rows) {
			return s.rows[i]
		}
		i -= len(s.rows)
	}
	return guideline{}
}

func (c *testCase) register(s Subject) error {
	if err := c.env.Register(s.EP.Name, s.EP.Library); err != nil {
		return fmt.Errorf("register %q: %w", s.EP.Library, err)
	}
	listed, err := c.listed(s.EP.Name)
	if err != nil {
		return err
	}
	c.devices, err = s.Choose(s.EP, listed)
	return err
}

// listed gives the devices of an EP.
func (c *testCase) listed(name string) (devices []ort.Device, err error) {
	all, err := c.env.Devices()
	for _, d := range all {
		if d.EP == name {
			devices = append(devices, d)
		}
	}
	return devices, err
}

// prove runs a row until its end, or until what is expected does not happen: then it gives the last
// call's error, or says why the guideline is not applicable.
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
