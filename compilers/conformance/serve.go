//go:build linux && (amd64 || arm64)

// Package conformance holds an execution provider (EP) to ONNX Runtime's guidelines: those for
// EPContext models and those for plugin libraries. It is the part that loads the library: package
// certificate has the guidelines, and starts a process for each, so that a crash or a hang is a
// result.
//
// A guideline is a few steps with what is expected of them, most of them calls of ONNX Runtime's C
// API, and a record of what happened. Start reading at Serve and at the verbs in steps.go.
package conformance

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/workerproto"
)

// Serve does the work that it reads, and writes the answers.
func Serve(in io.Reader, answers io.Writer) error {
	out := json.NewEncoder(answers)
	var req workerproto.Guideline
	err := json.NewDecoder(in).Decode(&req)
	a := workerproto.GuidelineAnswer{}
	if err == nil {
		a, err = answer(req, func(call string) error {
			return out.Encode(workerproto.GuidelineAnswer{Call: call})
		})
	}
	if err != nil {
		a.Error = err.Error()
	}
	return out.Encode(a)
}

func answer(req workerproto.Guideline, report func(string) error) (
	a workerproto.GuidelineAnswer, err error) {
	api, err := ort.Open(req.ORTLibrary)
	if err != nil {
		return a, err
	}
	log := &logged{}
	env, err := api.NewEnv(os.Stderr, log.add)
	if err != nil {
		return a, fmt.Errorf("start ONNX Runtime %s: %w", api.Version, err)
	}
	c := &testCase{env: env, ep: req.EP, work: req.Dir, watched: req.Watch, report: report,
		dir: filepath.Join(req.Dir, "case")}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return a, err
	}
	if req.Do == workerproto.Identify {
		a.ORTVersion = api.Version
		return a, c.identify(&a)
	}
	if !req.Bare {
		err := c.register(c.ep.Name)
		if err == nil {
			err = c.choose()
		}
		if err != nil {
			return a, err
		}
	}
	if req.Do == workerproto.FindFamily {
		c.findFamily(&a)
		if a.Finding != nil {
			a.Finding.Reason += log.text()
		}
		return a, nil
	}
	for _, f := range families() {
		if f.name == req.Family {
			c.family = f
			a.Finding = c.prove(func(c *testCase) {
				for _, step := range req.Steps {
					run(c, step)
				}
			})
			return a, nil
		}
	}
	return a, fmt.Errorf("there are no models of %q", req.Family)
}

// identify registers the library, and finds out what its EP is called.
func (c *testCase) identify(a *workerproto.GuidelineAnswer) error {
	before, err := c.env.Devices()
	if err != nil {
		return err
	}
	if err := c.register(cmp.Or(c.ep.Name, "epcached_conformance")); err != nil {
		return err
	}
	all, err := c.env.Devices()
	for _, d := range all {
		if c.ep.Name == "" &&
			!slices.ContainsFunc(before, func(b ort.Device) bool { return b.EP == d.EP }) {
			c.ep.Name = d.EP
		}
	}
	if err == nil && c.ep.Name == "" {
		err = errors.New("the library lists no device on this machine")
	}
	if err == nil {
		err = c.choose()
	}
	if err == nil {
		a.EP, a.Vendor, a.Devices = c.ep.Name, c.devices[0].EPVendor, ort.Facts(c.devices)
	}
	return err
}

func (c *testCase) register(name string) error {
	if err := c.env.Register(name, c.ep.Library); err != nil {
		return fmt.Errorf("register %q: %w", c.ep.Library, err)
	}
	return nil
}

func (c *testCase) choose() error {
	listed, err := c.env.DevicesOf(c.ep.Name)
	if err == nil {
		c.devices, err = ort.Choose(c.ep, listed)
	}
	return err
}

// findFamily looks for models of which the EP makes EPContext models. Without any, the finding says
// whether the EP has no EPContext, or fails to make one.
func (c *testCase) findFamily(a *workerproto.GuidelineAnswer) {
	dir := c.dir
	for i, f := range families() {
		c.dir, c.calls = fmt.Sprintf("%s/%d", dir, i), nil
		c.family = f
		compiled := false
		finding := c.prove(func(c *testCase) {
			run(c, "source m.onnx")
			run(c, "compile m.onnx")
			compiled = true
			c.read("m_ctx.onnx")
			a.SDK, a.Hardware = c.values("ep_sdk_version")[0], c.values("hardware_architecture")[0]
			a.Info = c.values("compatibility")[0]
		})
		if finding.Outcome == workerproto.Holds {
			a.Family, a.Finding = f.name, nil
			return
		}
		last := finding.Calls[len(finding.Calls)-1]
		// ONNX Runtime has a session without such a node, or it or the EP says that there is none.
		compiled = compiled || strings.Contains(last.Happened, "NULL EPContext node") ||
			strings.Contains(last.Happened, "ort error 9:")
		if compiled {
			finding.Outcome = workerproto.NotApplicable
		}
		finding.Reason = fmt.Sprintf("%s makes an EPContext model of none of the models that were "+
			"tried: %s: %s", c.ep.Name, last.Call, last.Happened)
		if a.Finding == nil || !compiled && a.Finding.Outcome != workerproto.Broken {
			a.Finding = finding
		}
	}
}

// prove runs a row until it stops.
func (c *testCase) prove(row func(c *testCase)) (f *workerproto.Finding) {
	f = &workerproto.Finding{Outcome: workerproto.Holds}
	defer func() {
		switch r := recover().(type) {
		case nil:
		case stopped:
			if f.Outcome, f.Reason = workerproto.NotApplicable, r.notApplicable; f.Reason == "" {
				f.Outcome = workerproto.Broken
			}
		default:
			panic(r)
		}
		f.Calls = c.calls
	}()
	row(c)
	return f
}

// logged keeps the first error that ONNX Runtime logs: where an EP takes no node, nothing else says
// why.
type logged struct {
	mu    sync.Mutex
	first string // guarded by mu
}

func (l *logged) add(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	text = brief(strings.Join(strings.Fields(text), " "))
	l.first = cmp.Or(l.first, "; ONNX Runtime logged: "+text)
}

func (l *logged) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.first
}
