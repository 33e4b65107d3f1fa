// Package certificate states how an execution provider (EP) keeps ONNX Runtime's guidelines. The
// guidelines are in guidelines.toml; a worker process tries each (compilers/conformance).
//
// Start reading at Examine.
package certificate

import (
	"cmp"
	"context"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/workerproto"
)

// Guideline is a sentence of ONNX Runtime's pages for authors of EPs.
type Guideline struct {
	Section string `json:"section"`
	ID      string `json:"id"`
	Level   string `json:"level"` // Required, Recommended or Optional
	Name    string `json:"name"`
	Page    string `json:"page"` // that it stands for; "": no page says it
	// Says is the page's sentence, or why the guideline is here without one.
	Says string `json:"says"`

	Steps []string `json:"-"`
	// Bare: the library is not registered before it begins.
	Bare bool `json:"-"`
	// First is the library that makes a build for it before it begins: "self", "older" or "newer",
	// which is the examined library for the older one; "": none.
	First string `json:"-"`
}

// Levels of guidelines.
const (
	Required    = "required"
	Recommended = "recommended"
	Optional    = "optional" // a feature that not every EP has
)

// Levels lists the levels, the highest first.
var Levels = []string{Required, Recommended, Optional}

// Finding is what became of a guideline.
type Finding struct {
	Guideline
	workerproto.Finding
}

// Library is an EP's library that was tried.
type Library struct {
	Path    string `json:"path"`
	SHA256  string `json:"sha256"`
	Version string `json:"ep_version"`
	Vendor  string `json:"vendor"`
	SDK     string `json:"sdk_version"`
}

// Certificate is how an EP keeps the guidelines, and what exactly was tried.
type Certificate struct {
	Suite         string                    `json:"suite_version"`
	Date          string                    `json:"date"`
	EP            string                    `json:"ep"` // as the library calls it
	Library       Library                   `json:"library"`
	Older         *Library                  `json:"older,omitempty"`
	Options       map[string]string         `json:"options"`
	ORTVersion    string                    `json:"ort_version"`
	Device        string                    `json:"device"`
	Driver        string                    `json:"driver_version"`
	Hardware      string                    `json:"hardware_architecture"`
	Compatibility string                    `json:"compatibility_string"`
	Host          string                    `json:"host"`
	Model         string                    `json:"model"` // the kind of models: "MatMul float"
	Summary       map[string]map[string]int `json:"summary"`
	Findings      []Finding                 `json:"guidelines"`
}

// BrokenLevel returns the highest level of which a guideline is broken, or "".
func (c Certificate) BrokenLevel() string {
	for _, level := range Levels {
		if c.Summary[level][workerproto.Broken] > 0 {
			return level
		}
	}
	return ""
}

//go:embed guidelines.toml
var table []byte

// guidelines returns all guidelines, in the order of the certificate, and the steps of a build.
func guidelines() (all []Guideline, build []string, err error) {
	var list struct {
		Build     []string
		Page      map[string]string
		Guideline []Guideline
	}
	err = toml.Unmarshal(table, &list)
	for i, g := range list.Guideline {
		list.Guideline[i].Page = list.Page[g.Page]
	}
	return list.Guideline, list.Build, err
}

// Job asks how an EP keeps the guidelines.
type Job struct {
	Worker, ORTLibrary string
	EP                 workerproto.EP // its library is set
	Older              string         // a library of an older version; "": none
	Suite              string         // version of this program
	Limit              time.Duration  // for one guideline
	Only               func(Guideline) bool
	Found              func(Finding) // is called with each finding; Only and Found may be nil
}

// TimeLimit is long enough for one guideline.
const TimeLimit = 30 * time.Minute

// Examine holds an EP to the guidelines, each in a process of its own. An EP without a name has the
// one that its library's file is known for, else the library's own. The error is that of a library
// that registers no devices.
func Examine(ctx context.Context, j Job) (Certificate, error) {
	all, build, err := guidelines()
	if err != nil {
		return Certificate{}, err
	}
	j.EP.Name = cmp.Or(j.EP.Name, nameOf(j.EP.Library))
	c := Certificate{Suite: j.Suite, Date: time.Now().UTC().Format(time.RFC3339), Host: host(),
		Options: j.EP.Options, Summary: map[string]map[string]int{}, Findings: []Finding{}}
	e := &examination{job: j, ep: j.EP, build: build}
	found, err := e.identify(ctx, &e.ep, &c.Library)
	if err != nil {
		return c, err
	}
	c.EP, c.ORTVersion, c.Driver = e.ep.Name, found.ORTVersion, driver(e.ep.Name, found.Devices)
	c.Device = workerproto.DeviceSelector{}.Listed(found.Devices)
	if j.Older != "" {
		e.older, c.Older = e.ep, &Library{}
		e.older.Library, e.older.Options = j.Older, j.EP.Options
		if _, err := e.identify(ctx, &e.older, c.Older); err != nil {
			return c, err
		}
		if a := e.family(ctx, e.older); a.Finding == nil {
			c.Older.SDK = a.SDK
		}
	}
	made := e.family(ctx, e.ep)
	c.Model, c.Library.SDK, c.Hardware, c.Compatibility = made.Family, made.SDK, made.Hardware,
		made.Info
	for _, g := range all {
		if j.Only != nil && !j.Only(g) {
			continue
		}
		f := Finding{g, workerproto.Finding{Outcome: workerproto.NotApplicable}}
		switch {
		case made.Finding != nil && g.ID == "creates":
			f.Finding = *made.Finding
		case made.Finding != nil && g.Section != "plugin library":
			f.Reason = made.Finding.Reason
		case (g.First == "older" || g.First == "newer") && j.Older == "":
			f.Reason = "no older version was named: --older LIBRARY"
		default:
			if f.Finding, err = e.try(ctx, g, made.Family); err != nil {
				return c, err
			}
		}
		if f.Calls == nil {
			f.Calls = []workerproto.Call{}
		}
		if c.Findings = append(c.Findings, f); c.Summary[f.Level] == nil {
			c.Summary[f.Level] = map[string]int{}
		}
		c.Summary[f.Level][f.Outcome]++
		if j.Found != nil {
			j.Found(f)
		}
	}
	return c, nil
}

// examination is a job with the EP and an older version of it, by the name that the library has.
type examination struct {
	job       Job
	ep, older workerproto.EP
	build     []string // steps
}

// identify finds out what a library is.
func (e *examination) identify(ctx context.Context, ep *workerproto.EP, l *Library) (
	workerproto.GuidelineAnswer, error) {
	content, err := os.ReadFile(ep.Library)
	if err != nil {
		return workerproto.GuidelineAnswer{}, err
	}
	a, err := e.ask(ctx, workerproto.Guideline{EP: *ep, Do: workerproto.Identify})
	if err != nil {
		return a, fmt.Errorf("conformance of %q: %w", ep.Library, err)
	}
	l.Path, l.SHA256 = ep.Library, fmt.Sprintf("%x", sha256.Sum256(content))
	if ep.Name = a.EP; len(a.Devices) > 0 {
		l.Vendor, l.Version = a.Vendor, a.Devices[0].EPMetadata["version"]
	}
	if info, known := compilers.EPByName(ep.Name); known {
		ep.Options = info.Resolve(ep.Library, ep.Options)
	}
	return a, nil
}

// family finds out which models the EP takes. The answer has a finding if it takes none.
func (e *examination) family(ctx context.Context, ep workerproto.EP) workerproto.GuidelineAnswer {
	a, err := e.ask(ctx, workerproto.Guideline{EP: ep, Do: workerproto.FindFamily})
	if err != nil {
		a.Finding = &workerproto.Finding{Outcome: workerproto.Broken, Calls: died(a, err),
			Reason: fmt.Sprintf("%s makes no EPContext model: %v", ep.Name, err)}
	}
	if a.Finding != nil {
		a.Family = "MatMul float"
	}
	return a
}

// try tries a guideline.
func (e *examination) try(ctx context.Context, g Guideline, family string) (workerproto.Finding,
	error) {
	dir, err := os.MkdirTemp("", "ep-conformance-")
	if err != nil {
		return workerproto.Finding{}, err
	}
	defer os.RemoveAll(dir) // what stays is in the temporary directory
	req := workerproto.Guideline{EP: e.ep, Steps: g.Steps, Bare: g.Bare, Family: family, Dir: dir,
		Watch: []string{"/tmp", "/var/tmp", "/dev/shm"}}
	if home, err := os.UserHomeDir(); err == nil {
		req.Watch = append(req.Watch, home)
	}
	maker := map[string]workerproto.EP{"self": e.ep, "newer": e.ep, "older": e.older}[g.First]
	if maker.Library != "" {
		a, err := e.ask(ctx, workerproto.Guideline{EP: maker, Steps: e.build, Family: family,
			Dir: dir})
		if err != nil {
			a.Finding = &workerproto.Finding{Outcome: workerproto.Broken, Calls: died(a, err)}
		}
		if a.Finding.Outcome == workerproto.Broken {
			if g.First == "older" {
				a.Finding.Outcome, a.Finding.Reason = workerproto.NotApplicable, "the older "+
					"version makes no build: "+a.Finding.Calls[len(a.Finding.Calls)-1].Happened
			}
			return *a.Finding, ctx.Err()
		}
	}
	if g.First == "newer" {
		req.EP = e.older
	}
	a, err := e.ask(ctx, req)
	switch {
	case err == nil:
		return *a.Finding, nil
	case ctx.Err() != nil:
		return workerproto.Finding{}, ctx.Err()
	case errors.Is(err, compilers.ErrStart):
		return workerproto.Finding{}, err
	}
	return workerproto.Finding{Outcome: workerproto.Broken, Calls: died(a, err)}, nil
}

// died is the call that a worker reported last.
func died(a workerproto.GuidelineAnswer, err error) []workerproto.Call {
	return []workerproto.Call{{Call: a.Call, Expected: "an answer", Happened: err.Error()}}
}

// nameOf is the name of the EP that a library is known for by its file's name, or "".
func nameOf(library string) string {
	for _, name := range compilers.EPNames() {
		info, _ := compilers.EPByName(name)
		for _, pattern := range info.Libraries {
			if ok, err := filepath.Match(pattern, filepath.Base(library)); err == nil && ok {
				return name
			}
		}
	}
	return ""
}

// driver returns the driver version that the devices state.
func driver(ep string, devices []workerproto.DeviceFacts) (version string) {
	info, _ := compilers.EPByName(ep)
	for _, d := range devices {
		for _, key := range append([]string{"os_driver_version"}, info.DriverMetadata...) {
			version = cmp.Or(version, d.DeviceMetadata[key], d.EPMetadata[key])
		}
	}
	return version
}

var processor = regexp.MustCompile(`(?m)^model name\s*: (.*)$`) // arm64 has none

// host describes this machine.
func host() string {
	release, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	cpu, _ := os.ReadFile("/proc/cpuinfo")
	text := fmt.Sprintf("%s %s %s ", runtime.GOOS, runtime.GOARCH, release)
	if name := processor.FindSubmatch(cpu); name != nil {
		text += string(name[1])
	}
	return strings.Join(strings.Fields(text), " ")
}
