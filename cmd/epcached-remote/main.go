// Command epcached-remote transfers builds between epcached and stores on other machines, so that
// the daemon needs no network. It has no store and no devices, is not trusted by the daemon, and
// ends when it is idle. Package remote is the client and describes the protocol.
//
//	epcached-remote serve    serve the socket of systemd, or the socketpair that is descriptor 3
//	epcached-remote version  print the version
//
// A remote is one tree of objects (store.go) behind one of four engines: a directory (file.go),
// plain HTTPS (https.go), S3 (s3.go), or an OCI registry (oci.go). Start reading at serve.go.
package main

import (
	"fmt"
	"io"
	"os"

	"github.com/epcached/epcached/internal/printable"
)

var version = "0.1.0-dev"

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

const usage = `usage: epcached-remote serve | version

It moves builds between epcached and other stores. The daemon or systemd starts it.
Credentials for s3:// are searched in this order: the file named as the remote in
$CREDENTIALS_DIRECTORY, the environment (AWS_ACCESS_KEY_ID, ...), ~/.aws/credentials,
and on AWS the identity of the instance or the web identity. Those for oci:// are the
first of the file named as the remote in $CREDENTIALS_DIRECTORY, $REGISTRY_AUTH_FILE,
the text in $DOCKER_AUTH_CONFIG, and the config.json in $DOCKER_CONFIG or ~/.docker;
its credential helpers are called.
`

// report prints an error, which may have text of a remote.
func report(to io.Writer, err error) {
	fmt.Fprintln(to, "epcached-remote:", printable.Text(err.Error()))
}

func run(args []string, out, errs io.Writer) int {
	switch {
	case len(args) == 1 && args[0] == "serve":
		if err := serve(); err != nil {
			report(errs, err)
			return 1
		}
		return 0
	case len(args) == 1 && args[0] == "version":
		fmt.Fprintln(out, "epcached-remote", version)
		return 0
	case len(args) == 1 && (args[0] == "help" || args[0] == "--help" || args[0] == "-h"):
		fmt.Fprint(out, usage)
		return 0
	}
	fmt.Fprint(errs, usage)
	return 2
}
