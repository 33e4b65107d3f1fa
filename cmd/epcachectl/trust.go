package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/remotes"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/portable"
)

func newTrust(a *cli.Call) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "trust show|keygen",
		Short: "show trusted keys, or make one",
		Long: `trust manages the keys that sign exported builds. The machine that exports has the
private key. The machines that import have the public key, in the daemon's configuration (trust =
["/etc/epcached/trust.d/ci.pub"]) or with import --trust.` + exit.Help(exit.Done, exit.BadUsage),
		Example: "  epcachectl trust keygen ci\n  epcachectl trust show ci.pub",
		Args:    cli.UsageArgs(0, 0),
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newTrustShow(a), newTrustKeygen(a))
	return cmd
}

func newTrustKeygen(a *cli.Call) *cobra.Command {
	root := false
	cmd := &cobra.Command{
		Use:   "keygen NAME",
		Short: "make a key pair",
		Long: `keygen writes an ed25519 key pair: NAME.key, private and without a password, and
NAME.pub, for the machines that take builds. Existing files are kept.

A public key can be limited: after the first line of its file, add lines with EPs, Builders or
Requests (names or keys) or Not-After (a date), and then an empty line.

--root makes a root key, which signs trust documents (remote revoke) and no builds. A machine that
trusts it takes builds of other machines only while such a document is in effect.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NotAllowed),
		Example: "  epcachectl trust keygen ci\n  epcachectl trust keygen root --root",
		Args:    cli.UsageArgs(1, 1),
		RunE: func(_ *cobra.Command, args []string) error {
			private, public, id, err := portable.GenerateKey(root)
			if err != nil {
				return err
			}
			files := []string{args[0] + ".key", args[0] + ".pub"}
			for i, text := range [][]byte{private, public} {
				mode := []os.FileMode{0o600, 0o644}[i]
				if err := writeNew(files[i], text, mode); errors.Is(err, fs.ErrExist) {
					return exit.Hint(fmt.Errorf("%s: the file exists, and is kept",
						files[i]), "choose another name: epcachectl trust keygen NAME")
				} else if err != nil {
					return exit.WithOperation("write", files[i], err)
				}
			}
			if a.JSON {
				return a.Print.JSON(jsonout.Object{"id": id, "private": files[0],
					"public": files[1]})
			}
			a.Print.Line("%s  key %s: keep it secret", files[0], portable.ShortID(id))
			a.Print.Line("%s  for trust in the configuration of the machines that take builds: of "+
				"[remote.NAME] to fetch, at the top to import", files[1])
			return nil
		},
	}
	cmd.Flags().BoolVar(&root, "root", false, "make a key that signs trust documents only")
	return cmd
}

func writeNew(name string, text []byte, mode os.FileMode) error {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Sync(), f.Close())
}

func newTrustShow(a *cli.Call) *cobra.Command {
	return &cobra.Command{
		Use:   "show [FILE...]",
		Short: "show the keys that are trusted",
		Long: `show prints the public keys in each FILE, and what they are trusted for. Without FILE
it reads those that the configuration names.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NotFound, exit.Damage,
				exit.NotAllowed),
		Example: "  epcachectl trust show\n  epcachectl trust show ci.pub",
		RunE: func(_ *cobra.Command, files []string) error {
			if len(files) == 0 {
				file, load := configFile(nil)
				s, err := load(file)
				if err != nil {
					return exit.Hint(exit.WithOperation("read", file, err),
						"name files of keys: epcachectl trust show FILE")
				}
				files = s.Trust
			}
			var keys []*portable.Key
			for _, file := range files {
				some, err := remotes.ReadKeys(file)
				if err != nil {
					return err
				}
				keys = append(keys, some...)
			}
			return printKeys(a, keys)
		},
	}
}

func printKeys(a *cli.Call, keys []*portable.Key) error {
	list, rows := []any{}, [][]string{{"KEY", "FILE", "FOR", "UNTIL"}}
	for _, k := range keys {
		until := "-"
		if !k.NotAfter.IsZero() {
			until = k.NotAfter.Format(time.DateOnly)
		}
		list = append(list, jsonout.Object{"id": k.ID, "file": k.File,
			"eps": append([]string{}, k.EPs...), "builders": append([]string{}, k.Builders...),
			"requests": append([]string{}, k.Requests...), "not_after": until, "root": k.Root})
		what := "all builds"
		if k.Root {
			what = "trust documents"
		} else if only := slices.Concat(k.EPs, k.Builders, k.Requests); len(only) > 0 {
			what = strings.Join(term.Printables(only), ", ")
		}
		rows = append(rows, []string{k.Short(), term.Printable(k.File), what, until})
	}
	if a.JSON {
		return a.Print.JSON(jsonout.Object{"keys": list})
	}
	if len(keys) == 0 {
		a.Print.Line("no key is trusted: nothing can be imported without --trust")
		return nil
	}
	a.Print.Table(rows)
	return nil
}
