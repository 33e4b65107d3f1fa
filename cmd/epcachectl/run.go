package main

import (
	"cmp"
	"errors"
	"os/exec"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/acquire"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/program"
)

type runCall struct {
	*cli.Call
	request acquire.Request // only --ep, --option and --runtime
	onMiss  string
	report  string // where the summary goes; "-": standard error
	program []string
}

// sentTolerance separates rounding errors from wrong results, such as those of quantised models on
// processors whose kernels saturate.
const sentTolerance = 0.01

func newRun(a *cli.Call) *cobra.Command {
	r := &runCall{Call: a}
	cmd := &cobra.Command{
		Use:   "run [--ep EP[:DEVICE]]... [--runtime DIR] [--report[=FILE]] -- PROGRAM ARGS",
		Short: "run a Python program with cached sessions",
		Long: `run starts PROGRAM with epcache's classes in place of onnxruntime.InferenceSession
and SessionOptions, in it and in all Python programs that it starts. They need not be changed, and
nothing is installed.

A session for a compiling execution provider, or for its devices, comes from the cache. With --ep,
so does a session for the CPU, in the same precision, unless the model computes something else
there (--verify-output). If that fails, or no daemon answers, the session is the program's own, on
the CPU.

--runtime DIR is a directory of Python packages ("pip install --target DIR") with onnxruntime and
execution providers that come before the program's own. An onnxruntime for another Python is
ignored.

Signals are passed on, and run ends as PROGRAM does. At the end it prints to standard error which
sessions did not come from the cache, and why. --report adds all others and what they gained;
--report=FILE writes that to FILE, and --json makes it JSON.

It does not reach programs in other languages, libraries that use ONNX Runtime themselves, Python
that ignores its environment ("python -I", "-E", frozen programs), onnxruntime before 1.24,
ORTModule and onnxruntime_genai. "epcachectl get --help" has a way for programs that take a model's
path.

If PROGRAM could not be started:` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NotFound, exit.NotAllowed),
		Example: `  epcachectl run --ep OpenVINOExecutionProvider:CPU -- rapidocr text --img a.png
  epcachectl run --ep QNNExecutionProvider:NPU --runtime ~/qnn --report -- python -m myapp
  epcachectl run --report=run.json --json -- python serve.py`,
		RunE: func(cmd *cobra.Command, args []string) error {
			r.program = args
			return r.run()
		},
	}
	f := cmd.Flags()
	f.SetInterspersed(false) // arguments after the program belong to the program
	f.Var(cli.EachValue(r.request.AddEP, "EP[:DEVICE]"), "ep", "execution provider for sessions "+
		"that request the CPU, such as OpenVINOExecutionProvider:CPU; repeatable, in order of "+
		"preference")
	f.Var(cli.EachValue(r.request.AddOption, "K=V"), "option",
		"provider option of the --ep before it; EP/K=V names another; repeatable")
	f.StringVar(&r.request.Runtime, "runtime", "",
		"`DIR` with onnxruntime and execution providers that come before the program's own")
	f.StringVar(&r.onMiss, "on-miss", "wait", "what a miss does, an `ACTION`: wait, background "+
		"(a plain session until the compile is done), claim, or fail")
	f.Float64Var(&r.request.Verify, "verify-output", sentTolerance,
		"with --ep: run each model once on zeros, and use the CPU if a value differs from the "+
			"CPU's by more than `TOLERANCE`, absolute and relative; 0: do not")
	f.StringVar(&r.report, "report", "",
		"report every session at the end, on standard error or to `FILE`")
	f.Lookup("report").NoOptDefVal = "-"
	return cmd
}

func (r *runCall) run() error {
	if err := r.check(); err != nil {
		return err
	}
	log, err := program.NewLog()
	if err != nil {
		return exit.WithOperation("run", r.program[0], err)
	}
	defer log.Remove()
	cmd, err := r.command(log)
	if err != nil {
		return exit.WithOperation("run", r.program[0], err)
	}
	r.Print.Clear()
	path := cmd.Path
	status, err := program.Run(cmd)
	if err != nil {
		return exit.WithOperation("run", path, err)
	}
	if err := r.summarise(log); err != nil {
		// only printed, because the program's own status counts
		r.Print.Failure(exit.WithOperation("run", path, err))
	}
	status.Repeat()
	if status.Code == 0 {
		return nil
	}
	return exit.Status(status.Code)
}

func (r *runCall) command(log *program.Log) (*exec.Cmd, error) {
	path, err := program.Find(r.program[0])
	if err != nil {
		return nil, err
	}
	settings, err := r.settings()
	if err != nil {
		return nil, err
	}
	environment, err := program.Environment(settings, log.Path, r.Socket)
	return &exec.Cmd{Path: path, Args: r.program, Env: environment,
		Stdin: r.Stdin, Stdout: r.Print.Out, Stderr: r.Print.Err}, err
}

func (r *runCall) settings() (s program.Settings, err error) {
	s.OnMiss, s.VerifyOutput, s.EPs = r.onMiss, r.request.Verify, r.request.EPs
	if r.request.Runtime != "" {
		s.Runtime, err = filepath.Abs(r.request.Runtime)
	}
	return s, err
}

func (r *runCall) check() error {
	if len(r.program) == 0 {
		return exit.Usage(exit.Hint(errors.New("run: no program"),
			"epcachectl run --ep EP -- python program.py"))
	}
	var err error
	if len(r.request.EPs) > 0 {
		err = r.request.Complete()
	} else if r.request.Given() {
		err = exit.Usagef("run: --option needs --ep")
	} else if r.request.Verify != sentTolerance {
		err = exit.Usagef("run: --verify-output needs --ep: without it no session moves to another")
	}
	err = cmp.Or(err, exit.OneOf("run: --on-miss", r.onMiss, "wait", "background", "claim", "fail"))
	if err != nil || r.request.Runtime == "" {
		return err
	}
	if found, err := filepath.Glob(filepath.Join(r.request.Runtime, "onnxruntime*")); err != nil ||
		len(found) == 0 {
		return exit.Usagef("run: --runtime %q: no packages of ONNX Runtime in this "+
			"directory", r.request.Runtime)
	}
	return nil
}

func (r *runCall) summarise(log *program.Log) error {
	s, err := log.Summary()
	if err != nil {
		return err
	}
	p := r.Print
	if r.report != "" && r.report != "-" {
		return s.WriteFile(r.report, r.JSON)
	}
	if r.JSON {
		return s.WriteJSON(p.Err)
	}
	for _, line := range s.Lines(r.report != "") {
		p.Note("run: " + line)
	}
	return nil
}
