// Command epcachectl asks the daemon for compiled models, and shows and changes what it keeps.
//
// Each verb has a file with its help, flags and code. They share root.go (the program without its process), request.go
// (what is asked for), model.go (opening models with the caller's own rights), print.go (the only place that
// prints messages) and exit.go (the exit codes). Verbs that look at more than one side have several files of one name.
package main

import (
	"os"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
)

// version is set by the linker for releases.
var version = "0.1.0-dev"

func main() {
	ctx, stop := exit.Interruptible()
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
