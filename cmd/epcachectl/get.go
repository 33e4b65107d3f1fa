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
		Short: "get the compiled form of models",
		Long: `get asks the daemon for the compiled form of each MODEL. What is there is there at once; what is not is
compiled first, and kept. For each model it prints what it is. Without --ep the execution provider is taken that can compile here, if
there is just one.

With --out DIR it also writes a copy that stands on its own: the graph and the files that it refers to, under
the names that it refers to them by. A file that is there already and differs is left alone unless
-f is given. Of a MODEL that is compiled already the copy is of its own files.

With -- PROGRAM it becomes that program, with {} in the arguments replaced by the path of the compiled
graph. Of several models an argument {} becomes all paths, and {1}, {2}, ... each one. The build is held for as
long as the program runs; signals and the exit status are the program's own. The environment variable EPCACHE_GET has what --json
prints, a list with an element for each MODEL: load the graph with its provider_options and session_options.
Where that is too long for a variable (128 KiB: very many models) it is left out, with a warning.

--on-miss says what to do where nothing is there: wait (compile, and wait for it), background (have it compiled, and do
not wait: it prints "queued" and the job), claim (see below), fail, refresh (compile anew even so), or bypass (compile for
this call only, and keep nothing). What is queued is done as far as get is concerned, unless it was to be copied or run: then it is not found.
A compile ends when all who wait for it have gone; with --keep-going it is finished all the same.

With --share the models, two or more, become one weight-sharing group: they are compiled together, in the given order, and
their graphs share what is equal in them. The group is kept, and found damaged, as one. A model of it that is asked for
alone later, with the same options, is answered from the group.

A MODEL that is compiled already is passed through. With --adopt it is stored, with the files that it
refers to: they are checked as a stranger's, loaded once, and then served, shared and collected as
those of any build. A model that is not adopted is passed through, with a warning that says why.

claim is for libraries that the daemon does not have, or may not run: those in --runtime DIR, which
has to be given. wait turns into it by itself where the daemon runs as another user and has no equal
libraries. The model is compiled here, in a process of its own (epcached-ort beside this program, or EPCACHE_WORKER), and given to the daemon, which
checks and keeps it for all programs of the same user with the same libraries. Where the store has no
space for it the call fails; with --out the files are written all the same, with a warning.

With --state DIR no daemon is asked, started or needed: the store in DIR is read as it is, on a read-only file system as well, nothing is
written there, and every file is hashed before it is given out. It prints the build, and the graph's path on a line of its own. A build that the store
has packed is unpacked into a folder of this user's: DIR of --unpack-to, else epcached/unpacked in XDG_CACHE_HOME (~/.cache), or where that cannot be
written, one in XDG_RUNTIME_DIR or TMPDIR. It is found there again by the next call, and may be deleted at any time; --out unpacks it where it is copied to. Nothing is compiled: what is not there is
not found. No execution provider is asked either, so the compatibility is unknown, or optimal where the libraries in
--runtime DIR are those that made the build; and where builds for several devices or SDKs fit, they are listed, for --build KEY to choose. A store that a
daemon has is refused: ask that one.

With -n nothing is compiled or written; it prints what would be.` + exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NotFound, exit.Damage, exit.NoDaemon, exit.Stale, exit.NotAllowed, exit.Interrupt),
		Example: `  epcachectl get mobilenet.onnx --ep OpenVINOExecutionProvider:CPU
  epcachectl get det.onnx --ep OpenVINOExecutionProvider:NPU,device=0x643e,is_virtual=1
  epcachectl get det.onnx --ep QNNExecutionProvider --option soc_model=60 --dim batch=1 --out compiled/
  epcachectl get model.onnx --ep OpenVINOExecutionProvider --on-miss background
  epcachectl get shipped_ctx.onnx --ep OpenVINOExecutionProvider --adopt
  epcachectl get --share prefill.onnx decode.onnx --ep QNNExecutionProvider --option soc_model=60
  epcachectl get model.onnx --ep OpenVINOExecutionProvider --state /usr/share/epcached
  epcachectl get model.onnx --ep OpenVINOExecutionProvider -- python3 serve.py --model={}`,
		RunE: func(cmd *cobra.Command, args []string) error {
			models := args
			if dash := cmd.ArgsLenAtDash(); dash >= 0 {
				models, g.Program = args[:dash], args[dash:]
				if len(g.Program) == 0 {
					return exit.Usagef("no program behind --")
				}
			}
			return g.Run(cmd.Context(), models)
		},
	}
	g.AddFlags(cmd)
	return cmd
}
