package standin

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/tinymodel"
)

// Fault is a way to misbehave in Compile.
type Fault string

// Faults.
const (
	None     Fault = ""
	Slow     Fault = "slow"     // takes a second more
	Hang     Fault = "hang"     // never ends: until the context ends, or Limits.Wall is over
	Crash    Fault = "crash"    // as a worker that died of a segmentation fault
	Garbage  Fault = "garbage"  // the graph is not ONNX
	Refuse   Fault = "refuse"   // ORT's code 1
	Huge     Fault = "huge"     // more output than the limit; a sparse file, which costs no space
	Links    Fault = "links"    // a symbolic link among the output
	NoNodes  Fault = "zero"     // a plain model without EPContext nodes
	NoOutput Fault = "nothing"  // reports success and leaves no graph
	Missing  Fault = "missing"  // the graph refers to a binary that is not there
	Escape   Fault = "escape"   // the graph refers to a binary outside the directory
	Residue  Fault = "residue"  // leaves a file that nothing refers to
	Killed   Fault = "killed"   // as a worker that the kernel killed for its memory
	Mutilate Fault = "mutilate" // the binary is not what Check accepts
)

func (c *Compiler) misbehave(ctx context.Context, job compilers.Job) error {
	fault := cmp.Or(Fault(job.EPs[0].Options["fault"]), c.Fault)
	if controlled(job) && !c.Broken {
		fault = None
	}
	graph := filepath.Join(job.Dir, job.Output)
	binary := strings.TrimSuffix(graph, ".onnx") + ".bin"
	switch fault {
	case None:
		return nil
	case Slow:
		return sleep(ctx, time.Second)
	case Hang:
		return c.hang(ctx)
	case Crash:
		return &compilers.ExitError{Compiler: EP, Signal: "segmentation fault", Name: "SIGSEGV",
			Code: -1, Stderr: "stand-in: signal 11\n"}
	case Killed:
		return &compilers.ExitError{Compiler: EP, Signal: "killed", Name: "SIGKILL", Code: -1}
	case Refuse:
		return &compilers.RefusedError{Doing: "compile", Code: 1,
			Text: "stand-in was told to refuse"}
	case Garbage:
		return os.WriteFile(graph, []byte(strings.Repeat("\xff\x00garbage", 100)), 0o600)
	case Huge:
		return sparse(graph+".weights", c.limit()+1)
	case Links:
		return os.Symlink("/dev/null", filepath.Join(job.Dir, "link.bin"))
	case NoNodes:
		return os.WriteFile(graph, tinymodel.Relu(), 0o600)
	case NoOutput:
		return os.Remove(graph)
	case Missing:
		return os.Remove(binary)
	case Escape:
		return rewrite(graph, filepath.Base(binary), "../"+filepath.Base(binary)[3:])
	case Residue:
		return os.WriteFile(filepath.Join(job.Dir, "residue.tmp"), []byte("left over"), 0o600)
	case Mutilate:
		return os.WriteFile(binary, []byte("not a context"), 0o600)
	}
	return fmt.Errorf("stand-in: %w: there is no fault %q", compilers.ErrOption, fault)
}

// controlled reports whether it is compilers.Control that compiles: the smallest model, of which
// nothing can be wrong.
func controlled(job compilers.Job) bool { return filepath.Base(job.Model) == compilers.ProbeModel }

func (c *Compiler) hang(ctx context.Context) error {
	wall := cmp.Or(c.Limits.Wall, compilers.DefaultLimits.Wall)
	if err := sleep(ctx, wall); err != nil {
		return err
	}
	return fmt.Errorf("compile: %w after %v", compilers.ErrTimeout, wall)
}

func (c *Compiler) limit() int64 { return cmp.Or(c.Limits.Output, compilers.DefaultLimits.Output) }

func sparse(path string, size int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := f.Truncate(size); err != nil {
		f.Close() // the error of Truncate says it all
		return err
	}
	return f.Close()
}

// rewrite replaces a text in a file by another of the same length, so that ONNX's lengths still
// hold.
func rewrite(path, from, to string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return os.WriteFile(path, []byte(strings.Replace(string(b), from, to, 1)), 0o600)
}
