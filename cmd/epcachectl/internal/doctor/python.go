package doctor

import (
	"context"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/tinymodel"
)

//go:embed doctor.py
var doctorScript string

const (
	pythonMark    = "epcachectl-doctor:" // before the one line that counts: vendors' libraries print, too
	pythonTimeout = 60 * time.Second
	pythonOutput  = 1 << 20 // bytes that are kept of what it prints
)

type pythonFacts struct {
	Cores      []string `json:"cores"` // packages that bring onnxruntime itself
	Epcache    bool     `json:"epcache"`
	ORTVersion string   `json:"ort_version"`
	Site       string   `json:"site"` // the folder that onnxruntime stands in
	Providers  []string `json:"providers"`
	Plugins    bool     `json:"plugins"` // it can register plugins
	Error      string   `json:"error"`
}

type pluginFacts struct {
	Devices []string `json:"devices"`
	Error   string   `json:"error"`
}

// startPlugin starts an execution provider in a process of its own, for it may crash.
func startPlugin(ctx context.Context, python string, ep compilers.EPLibrary) (*pluginFacts, error) {
	info, _ := compilers.EPByName(ep.EP)
	options, err := json.Marshal(info.Resolve(ep.Path, nil))
	if err != nil {
		return nil, err
	}
	var facts pluginFacts
	err = runPython(ctx, &facts, python, ep.EP, ep.Path, hex.EncodeToString(tinymodel.Relu()), string(options))
	if err == nil && facts.Error != "" {
		err = errors.New(facts.Error)
	}
	return &facts, err
}

// askEpcache has the Python's own epcache look at it, so that both doctors find the same. It fails where that is too old.
func askEpcache(ctx context.Context, python, socket string) ([]Finding, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*pythonTimeout)
	defer cancel()
	args := []string{"-m", "epcache", "doctor", "--application", "--json"}
	if socket != "" {
		args = append(args, "--socket", socket)
	}
	cmd := exec.CommandContext(ctx, python, args...)
	cmd.WaitDelay = time.Second // what it started may hold its output open
	out := compilers.Tail{Limit: pythonOutput}
	cmd.Stdout = &out
	err := cmd.Run()
	var found Result
	if wrong := json.Unmarshal([]byte(out.String()), &found); wrong != nil || len(found.Findings) == 0 {
		return nil, errors.Join(wrong, err)
	}
	return found.Findings, nil // problems make another exit status
}

func runPython(ctx context.Context, to any, python string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, pythonTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, python, append([]string{"-c", doctorScript}, args...)...)
	cmd.WaitDelay = time.Second // what it started may hold its output open
	out, errs := compilers.Tail{Limit: pythonOutput}, compilers.Tail{Limit: pythonOutput}
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if ctx.Err() != nil {
		return fmt.Errorf("it did not end in %v", pythonTimeout)
	}
	for line := range strings.Lines(out.String()) {
		if text, ok := strings.CutPrefix(line, pythonMark); ok {
			return json.Unmarshal([]byte(text), to)
		}
	}
	if err == nil {
		err = errors.New("it printed no answer")
	}
	if said := lastLine(errs.String()); said != "" {
		err = fmt.Errorf("%w: %s", err, said)
	}
	return err
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}
