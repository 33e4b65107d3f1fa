package main

import (
	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/acquire"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
)

func newGet(a *cli.Call) *cobra.Command {
	g := &acquire.Get{Call: a}
	cmd := &cobra.Command{
		Use:   "get MODEL... [--ep EP[:DEVICE]...] [flags] [-- PROGRAM ARGS]",
		Short: "get compiled models",
		Long: `get requests the compiled form of each MODEL, and prints a description of it. A
stored build is returned at once. Otherwise the model is compiled first, and stored. Without --ep
the only execution provider that can compile here is used.

--out DIR also writes a copy that is complete: the graph and the files that it refers to. Existing
files that differ are kept unless -f is given. For a MODEL that is compiled already, its own files
are copied.

-- PROGRAM replaces this process by PROGRAM, with {} in its arguments replaced by the graph's path.
For several models {} becomes all paths, and {1}, {2}, ... one each. The lease is kept while the
program runs. The variable EPCACHE_GET has what --json prints, if it fits into 128 KiB: register
its ep_libraries, and load the graph with its provider_options and session_options.

--ort-version states the ONNX Runtime of PROGRAM, so that it gets no graph that it cannot load. With
--or-plain PROGRAM runs with MODEL itself if there is no build; its outcome is then failed, or
queued with --on-miss background.

--on-miss says what to do on a miss: wait (compile and wait), background (compile, print the job,
do not wait), claim (compile in this process's worker), fail, fetch (from remotes, never compile),
refresh (recompile even on a hit) or bypass (compile for this call, store nothing). A compile is
cancelled when all its callers have left, unless one of them gave --keep-going.

--share compiles two or more models as one weight-sharing group, in the given order. A single model
of the group that is requested later with the same options is served from the group.

A MODEL that is compiled already is passed through. --adopt stores it with its files, after the
checks for untrusted input and one load.

claim is for libraries in --runtime DIR that the daemon does not have or may not run. The worker
(epcached-ort beside this program, or EPCACHE_WORKER) compiles here, and the daemon checks and
stores the result for this user's programs with the same libraries. wait becomes claim by itself if
the daemon runs as another user without equal libraries.

--state DIR reads a store that no daemon uses, also on a read-only file system. Nothing is written
there, compiled or run, and every file is hashed. Packed builds are unpacked into --unpack-to, by
default epcached/unpacked in XDG_CACHE_HOME (~/.cache).

With --state, compatibility is unknown, or optimal if --runtime DIR has the libraries that made the
build. If several builds fit they are listed, and --build chooses.

With -n nothing is compiled or written; it prints what would be done.` +
			exit.Help(exit.ServingCodes...),
		Example: `  epcachectl get mobilenet.onnx --ep OpenVINOExecutionProvider:CPU
  epcachectl get det.onnx --ep OpenVINOExecutionProvider:NPU,device=0x643e,is_virtual=1
  epcachectl get det.onnx --ep QNNExecutionProvider --option soc_model=60 --dim batch=1 --out qnn/
  epcachectl get model.onnx --ep OpenVINOExecutionProvider --on-miss background
  epcachectl get shipped_ctx.onnx --ep OpenVINOExecutionProvider --adopt
  epcachectl get --share prefill.onnx decode.onnx --ep QNNExecutionProvider --option soc_model=60
  epcachectl get model.onnx --ep OpenVINOExecutionProvider --state /usr/share/epcached
  epcachectl get model.onnx --ep OpenVINOExecutionProvider -- python3 serve.py --model={}
  epcachectl get model.onnx --ort-version 1.30.0 --or-plain -- ./program {}`,
		RunE: func(cmd *cobra.Command, args []string) error {
			models := args
			if dash := cmd.ArgsLenAtDash(); dash >= 0 {
				models, g.Program = args[:dash], args[dash:]
				if len(g.Program) == 0 {
					return exit.Usagef("no program after --")
				}
			}
			return g.Run(cmd.Context(), models)
		},
	}
	g.AddFlags(cmd)
	return cmd
}
