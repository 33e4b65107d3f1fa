// Package remotes has the verbs of epcachectl that change what is at a remote: revoke, which signs
// its trust document, gc and check.
package remotes

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// revoke is one call of the verb.
type revoke struct {
	*cli.Call
	key, reason             string
	signers, builds         []string
	days                    uint32
	undo, dryRun, replacing bool

	root  *portable.Signer
	named []portable.Revocation
}

// NewRevoke returns the verb revoke.
func NewRevoke(a *cli.Call) *cobra.Command {
	v := &revoke{Call: a}
	cmd := &cobra.Command{
		Use:   "revoke NAME --key ROOT.key [--signer KEY]... [--build BUILD]... [-n]",
		Short: "sign and replace a remote's trust document",
		Long: `revoke adds revoked keys and builds to the remote's trust document, signs it with the
root key, and uploads it. Without --signer and --build it only renews the document, which expires
after --days: do that at least once a week. The machines of the remote read it within the hour, or
at a pull, and withhold what it revokes. They fetch builds only while a document is valid.` +
			exit.Help(exit.Done, exit.Failed, exit.BadUsage, exit.NotFound, exit.Damage,
				exit.NoDaemon, exit.NotAllowed),
		Example: `  epcachectl remote revoke fleet --key root.key
  epcachectl remote revoke fleet --key root.key --signer ci.pub --reason "the key was leaked"
  epcachectl remote revoke fleet --key root.key --build sha256:MANIFEST --undo -n`,
		Args: cli.UsageArgs(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := v.check(); err != nil {
				return err
			}
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				return v.run(ctx, c, args[0])
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&v.key, "key", "", "sign with the private root key in `FILE`")
	f.StringArrayVar(&v.signers, "signer", nil,
		"revoke all that the `KEY` signed, a public key's file or an id; repeatable")
	f.StringArrayVar(&v.builds, "build", nil,
		"revoke the `BUILD`, a whole build key or sha256:MANIFEST; repeatable")
	f.StringVar(&v.reason, "reason", "by request", "say why, in at most 200 bytes of `TEXT`")
	f.Uint32Var(&v.days, "days", portable.DocumentDays, "the document expires after `N` days")
	f.BoolVar(&v.undo, "undo", false, "remove the named keys and builds from the document")
	f.BoolVar(&v.replacing, "new", false, "replace a document that another root key signed")
	f.BoolVarP(&v.dryRun, "dry-run", "n", false, "upload nothing, print the document")
	return cmd
}

// check checks the flags and reads the local key, before the first request to the daemon.
func (v *revoke) check() (err error) {
	if v.key == "" || v.days == 0 {
		return exit.Usagef("remote revoke: give --key, the root key's file, and at least 1 day")
	}
	if v.root, err = portable.ReadSigner(v.key); err != nil {
		return exit.WithOperation("read", v.key, err)
	}
	if !v.root.Root {
		return exit.Usage(exit.Hint(fmt.Errorf("--key %s: it is no root key", v.key),
			"make one: epcachectl trust keygen NAME --root"))
	}
	for _, text := range v.signers {
		id := text
		if _, err := hex.DecodeString(text); err != nil || len(text) != 64 {
			keys, err := ReadKeys(text)
			if err != nil {
				return err
			}
			id = keys[0].ID
		}
		v.named = append(v.named, portable.Revocation{Key: id, Reason: v.reason})
	}
	for _, text := range v.builds {
		one := portable.Revocation{Reason: v.reason}
		if strings.HasPrefix(text, "sha256:") {
			err = one.Manifest.UnmarshalText([]byte(text))
		} else {
			err = one.Build.UnmarshalText([]byte(text))
		}
		if err != nil {
			return exit.Usagef("--build %.80q: %v", text, err)
		}
		v.named = append(v.named, one)
	}
	return nil
}

// latest returns the root key's latest document among the remote's and the daemon's, and the digest
// of the remote's document, nil if it has none.
func (v *revoke) latest(ctx context.Context, c *unixsock.Client, name string) (d portable.Document,
	over []byte, err error) {
	there, err := unixsock.Ask[wire.RemoteTrustReply](ctx, c, &wire.RemoteTrust{Remote: name}, nil)
	if err != nil {
		return d, nil, err
	}
	here, err := unixsock.Ask[wire.RemoteTrustReply](ctx, c, &wire.RemoteTrust{}, nil)
	if err != nil {
		return d, nil, err
	}
	for i, raw := range append(there.GetDocuments(), here.GetDocuments()...) {
		one, err := v.root.ReadDocument(raw)
		atRemote := i < len(there.GetDocuments())
		if atRemote {
			sum := portable.DigestOf(raw)
			over = sum[:]
		}
		if atRemote && err != nil && !v.replacing {
			return d, nil, exit.Hint(exit.Damaged(fmt.Errorf("the document of remote %s: %w", name,
				err)), "sign with its root key, or begin a new one: --new")
		}
		if err == nil && one.Sequence > d.Sequence {
			d = *one
		}
	}
	return d, over, nil
}

func (v *revoke) run(ctx context.Context, c *unixsock.Client, name string) error {
	d, over, err := v.latest(ctx, c, name)
	if err != nil {
		return exit.WithVerb("remote revoke", err)
	}
	now := time.Now()
	d.Sequence, d.Issued, d.Expires = d.Sequence+1, now, now.AddDate(0, 0, int(v.days))
	for i := range v.named {
		one := &v.named[i]
		d.Revoked = slices.DeleteFunc(d.Revoked, func(old portable.Revocation) bool {
			return old.Same(one)
		})
		if !v.undo {
			d.Revoked = append(d.Revoked, *one)
		}
	}
	raw, err := v.root.SignDocument(d)
	if err != nil {
		return exit.WithVerb("remote revoke", err)
	}
	if !v.dryRun {
		_, err := unixsock.Ask[wire.RemoteTrustReply](ctx, c,
			&wire.RemoteTrust{Remote: name, Document: raw, Over: over}, nil)
		if err != nil {
			return exit.WithVerb("remote revoke", err)
		}
	}
	return v.report(name, &d)
}

func (v *revoke) report(name string, d *portable.Document) error {
	if v.JSON {
		list := []any{}
		for _, r := range d.Revoked {
			one := jsonout.Object{"key": r.Key, "build": "", "manifest": "", "reason": r.Reason}
			if r.Build != (portable.Hash{}) {
				one["build"] = r.Build.String()
			}
			if r.Manifest != (portable.Digest{}) {
				one["manifest"] = r.Manifest.Hex()
			}
			list = append(list, one)
		}
		return v.Print.JSON(jsonout.Object{"remote": name, "root": v.root.ID,
			"sequence": d.Sequence, "expires_ms": d.Expires.UnixMilli(), "revoked": list,
			"dry_run": v.dryRun})
	}
	verb := "has"
	if v.dryRun {
		verb = "would have"
	}
	v.Print.Line("remote %s %s trust document %d, until %s", term.Printable(name), verb, d.Sequence,
		term.Time(d.Expires.UnixMilli()))
	if len(v.named) > 0 {
		v.Print.Line("  other machines apply it within an hour, or when they next pull a build")
	}
	for i := range d.Revoked {
		v.Print.Line("  %s: %s", d.Revoked[i].String(), term.Printable(d.Revoked[i].Reason))
	}
	return nil
}

// NewGC returns the verb gc.
func NewGC(a *cli.Call) *cobra.Command {
	dryRun := false
	cmd := &cobra.Command{
		Use:   "gc NAME [-n]",
		Short: "remove obsolete objects from a remote",
		Long: `gc removes objects that no machine finds any more: descriptions of builds that were
not renewed for 30 to 60 days, files that no other build needs, expired leases, and objects of
remote check. Nothing younger than a day is removed. Use it where the store has no lifecycle rules,
such as a directory, first with -n. It needs the rights to list and to delete.` +
			exit.Help(exit.WaitingCodes...),
		Example: "  epcachectl remote gc fleet -n\n  epcachectl remote gc fleet",
		Args:    cli.UsageArgs(1, 1),
		RunE: a.RunWithEntries(func(ctx context.Context, c *unixsock.Client, args []string) error {
			reply, err := cli.AskWithProgress[wire.CollectRemoteReply](ctx, a, c,
				&wire.CollectRemote{Remote: args[0], DryRun: dryRun})
			if err != nil {
				return exit.WithVerb("remote gc", err)
			}
			if a.JSON {
				return a.PrintForScripts(dryRun, reply)
			}
			removed := "REMOVED"
			if dryRun {
				removed = "WOULD REMOVE"
			}
			rows := [][]string{{"KIND", removed, "BYTES", "KEPT", "TOO YOUNG"}}
			for _, k := range reply.GetKinds() {
				rows = append(rows, []string{term.Printable(k.GetName()),
					fmt.Sprint(k.GetRemoved()), term.Bytes(k.GetBytes()),
					fmt.Sprint(k.GetKept()), fmt.Sprint(k.GetYoung())})
			}
			a.Print.Table(rows)
			return nil
		}),
	}
	cmd.Flags().BoolVarP(&dryRun, "dry-run", "n", false, "remove nothing, print what would be")
	return cmd
}
