package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// imports is one call of the verb.
type imports struct {
	*cli.Call
	trust              []string
	store              string
	check, pin, dryRun bool

	keys []string // PEM texts
}

func newImport(a *cli.Call) *cobra.Command {
	im := &imports{Call: a}
	cmd := &cobra.Command{
		Use:   "import FILE|DIR|- [--check] [--pin] [-n]",
		Short: "store builds of another machine",
		Long: `import stores the builds of a bundle that export wrote, each as a whole or not at
all, and prints the outcome of each:

  hit here         stored, or there already: a request finds it
  other hardware   it is for other devices, or does not load or run here; not stored
  unknown library  no runtime here has a library for it; not stored
  refused          not signed by a trusted key, or damaged; not stored

A build that is too large for the store has the outcome "no space", and is not stored.

A build counts only if a key signed it that the daemon's configuration trusts, or --trust names. The
daemon checks its files, loads it, and runs it once on zeros if it was made on another kind of
machine. Builds are stored for this user, or for all users if an administrator or publisher imports
them. Importing again changes nothing.

--check does all of that, and stores nothing. -n looks at the signatures and the libraries only.` +
			exit.Help(exit.ServingCodes...),
		Example: `  epcachectl import /media/stick/models.tar
  epcachectl import models.tar --trust ci.pub --pin
  ssh builder epcachectl export --all --key ci.key --to - | epcachectl import -`,
		Args: cli.UsageArgs(1, 1),
		RunE: a.RunWithEntries(func(ctx context.Context, c *unixsock.Client, args []string) error {
			return im.run(ctx, c, args[0])
		}),
	}
	f := cmd.Flags()
	f.StringArrayVar(&im.trust, "trust", nil, "trust the public keys in `FILE` too; repeatable")
	f.StringVar(&im.store, "store", "", "store as `SCOPE`: user or shared")
	f.BoolVar(&im.check, "check", false, "check and load the builds, store nothing")
	f.BoolVar(&im.pin, "pin", false, "protect the builds from eviction")
	f.BoolVarP(&im.dryRun, "dry-run", "n", false, "store nothing, print what would be")
	return cmd
}

// became is the outcome of one build of a bundle.
type became struct {
	name string
	card *portable.Card // nil if it is damaged
	*wire.ImportReply
	pinned bool
}

func (im *imports) run(ctx context.Context, c *unixsock.Client, from string) error {
	if im.pin && (im.check || im.dryRun) {
		return exit.Usagef("import: --pin cannot be combined with --check or -n, which store " +
			"nothing")
	}
	for _, file := range im.trust {
		text, err := portable.ReadFile(file, portable.MaxPEM)
		if err != nil {
			return exit.WithOperation("read", file, err)
		}
		if _, err := portable.ParseKeys(file, text); err != nil {
			return exit.Usage(err)
		}
		im.keys = append(im.keys, string(text))
	}
	b, err := im.open(ctx, from)
	if err != nil {
		if format, is := errors.AsType[*portable.FormatError](err); is {
			err = exit.Damaged(format)
		}
		if from == "-" {
			from = stdin
		}
		return exit.WithOperation("import", from, modelfile.PlainPathError(err))
	}
	defer b.Close()
	var all []became
	err = im.WithProgress(func(progress func(*wire.Progress)) error {
		for i := range b.Cards {
			far := func(p *wire.Progress) {
				p.Detail = fmt.Sprintf("build %d of %d", i+1, len(b.Cards))
				progress(p)
			}
			one, err := im.one(ctx, c, b, &b.Cards[i], far)
			if errors.Is(err, unixsock.ErrNoSpace) { // a smaller build may be stored
				one, err = &became{name: b.Cards[i].Name, card: b.Cards[i].Card,
					ImportReply: &wire.ImportReply{Outcome: noSpace, Text: err.Error()}}, nil
			}
			if err != nil {
				return exit.WithOperation("import", b.Cards[i].Name, err)
			}
			all = append(all, *one)
		}
		return nil
	})
	if err == nil || len(all) > 0 {
		err = errors.Join(err, im.report(all))
	}
	if err != nil {
		return err
	}
	return im.status(all)
}

const noSpace = "no space" // outcome of a build

const stdin = "standard input" // name in errors

func (im *imports) open(ctx context.Context, from string) (*portable.Bundle, error) {
	if from != "-" {
		return portable.Open(ctx, from)
	}
	f, err := unnamed()
	if err != nil {
		return nil, err
	}
	r, w := io.Pipe() // because a read of standard input does not end with the context
	defer r.Close()
	defer context.AfterFunc(ctx, func() { _ = w.CloseWithError(ctx.Err()) })()
	go func() {
		_, err := io.Copy(w, im.Stdin)
		_ = w.CloseWithError(err)
	}()
	return portable.OpenStream(ctx, r, f, stdin)
}

// unnamed creates a file that is removed when it is closed.
func unnamed() (*os.File, error) {
	f, err := os.CreateTemp("", "epcachectl-import-")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// one imports one build. It asks the daemon whether it wants the build before it unpacks files.
func (im *imports) one(ctx context.Context, c *unixsock.Client, b *portable.Bundle,
	e *portable.Entry,
	far func(*wire.Progress)) (*became, error) {
	out := &became{name: e.Name, card: e.Card}
	if e.Err != nil {
		return out, out.damaged(e.Err)
	}
	request := &wire.Import{Card: e.Raw, Keys: im.keys, Store: im.store, Check: im.check}
	size := len(e.Raw)
	for _, raw := range b.Documents {
		if size += len(raw); size < wire.MaxFrame*3/4 {
			request.Trust = append(request.Trust, raw)
		}
	}
	reply, err := c.Import(ctx, request, nil, far)
	if err != nil {
		return nil, err
	}
	out.ImportReply = reply
	if !reply.GetWanted() || im.dryRun {
		return out, im.pinned(ctx, c, out)
	}
	request.Trust = nil // the daemon has them already
	dir, err := os.MkdirTemp("", "epcachectl-import-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	var files []*os.File
	defer func() { modelfile.CloseFiles(files) }()
	done, total := int64(0), e.Config.Size()
	for i, f := range e.Config.Files {
		name := filepath.Join(dir, fmt.Sprint(i))
		to, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return nil, err
		}
		err = b.Extract(ctx, e.Card, i, to, func(n int) {
			done += int64(n)
			far(&wire.Progress{Phase: "reading", DoneBytes: done, TotalBytes: total})
		})
		if err = errors.Join(err, to.Close()); err != nil {
			return out, out.damaged(err)
		}
		file, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
		request.Files = append(request.Files, &wire.PutFile{Name: f.Name, Fd: uint32(i)})
	}
	if out.ImportReply, err = c.Import(ctx, request, files, far); err != nil {
		return nil, err
	}
	return out, im.pinned(ctx, c, out)
}

// damaged sets the outcome if the error says that the build is damaged, and returns other errors.
func (o *became) damaged(err error) error {
	format, is := errors.AsType[*portable.FormatError](err)
	if !is {
		return err
	}
	o.ImportReply = &wire.ImportReply{Outcome: "refused", Text: format.Error(), Damaged: true}
	return nil
}

func (im *imports) pinned(ctx context.Context, c *unixsock.Client, o *became) error {
	if !im.pin || im.check || im.dryRun || o.GetOutcome() != "hit here" {
		return nil
	}
	_, err := unixsock.Ask[wire.ChangeReply](ctx, c,
		&wire.Pin{Entries: []string{o.GetRequestKey()}}, nil)
	o.pinned = err == nil
	return err
}

func (im *imports) report(all []became) error {
	if im.JSON {
		list := []any{}
		for _, o := range all {
			one := jsonout.Of(o.ImportReply)
			one["name"], one["pinned"] = o.name, o.pinned
			list = append(list, one)
		}
		return im.Print.JSON(jsonout.Object{"builds": list, "dry_run": im.dryRun || im.check})
	}
	rows := [][]string{{"BUILD", "EP", "OUTCOME", "WHY"}}
	for _, o := range all {
		var eps []string
		for i := 0; o.card != nil && i < len(o.card.Config.EPs); i++ {
			eps = append(eps, o.card.Config.EPs[i].Name)
		}
		outcome := o.GetOutcome()
		if o.GetStored() {
			outcome = "stored for " + o.GetScope()
		}
		rows = append(rows, []string{term.Short(o.name[min(2, len(o.name)):]),
			term.TextOrDash(strings.Join(eps, ", ")), outcome, term.Printable(o.GetText())})
	}
	if len(all) == 0 {
		im.Print.Line("the bundle has no builds")
		return nil
	}
	im.Print.Table(rows)
	return nil
}

// status returns the exit status: for damage, otherwise for untrusted signatures, otherwise if no
// build of the bundle suits this machine.
func (im *imports) status(all []became) error {
	if slices.ContainsFunc(all, func(o became) bool { return o.GetOutcome() == noSpace }) {
		return exit.Status(exit.Failed)
	}
	hits, distrusted, hints := 0, false, []string(nil)
	for _, o := range all {
		switch {
		case o.GetDamaged():
			return exit.Status(exit.Damage)
		case o.GetOutcome() == "hit here":
			hits++
		case o.GetOutcome() == "refused" && o.GetKey() == "":
			distrusted = true
			if h := o.GetHint(); h != "" && !slices.Contains(hints, h) {
				hints = append(hints, term.Printable(h))
			}
		}
	}
	switch {
	case distrusted:
		for _, hint := range hints {
			im.Print.Hint(hint)
		}
		return exit.Status(exit.NotAllowed)
	case hits == 0 && len(all) > 0:
		return exit.Status(exit.Stale)
	}
	return nil
}
