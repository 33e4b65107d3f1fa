package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cache/layer"
	"github.com/epcached/epcached/cmd/epcachectl/internal/cli"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelpackage"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// export is one call of the verb.
type export struct {
	*cli.Call
	to, key, facts, builder, notAfter string

	layer, modelPackage string
	all, pinned, names  bool

	signer  *portable.Signer
	expires time.Time
	targets []target
	writer  *portable.Writer
}

func newExport(a *cli.Call) *cobra.Command {
	e := &export{Call: a}
	cmd := &cobra.Command{
		Use: "export MODEL|ENTRY...|--all --to FILE.tar|DIR|- | --layer DIR | " +
			"--model-package DIR",
		Short: "write builds for another machine",
		Long: `export writes builds into a bundle, for epcachectl import on another machine. A
bundle is an OCI image layout: a directory, a .tar file, or a tar on standard output (-). A
directory that is a bundle already keeps its builds. ENTRY is as for show.

A build for OpenVINO holds the model's weights, so a bundle is as private as the models. It contains
no paths, users or source models, and the models' names only with --names.

--key FILE signs the builds with a private key of trust keygen. The other machine imports only
builds that are signed by a key that it trusts. Two exports of the same builds have the same bytes.

--layer DIR makes a layer instead, or adds to one: a read-only store for an image, which the
configuration of a device names in [[layer]]. The device serves its files in place.

--model-package DIR makes a model package, which ONNX Runtime 1.31 and later opens without epcached,
with one variant for each build of a model. ONNX Runtime loads the variant that the execution
provider rates best. Of builds that it cannot distinguish, the package has the newest.

--for FACTS.json names the output of epcachectl facts on the target machine. Builds that were
compiled ahead of time, say for an NPU, then answer the requests of that machine, although its
devices differ from those here.

Private builds of other users are left out, also for administrators.` +
			exit.Help(exit.ServingCodes...),
		Example: `  epcachectl export mobilenet.onnx --to /media/stick/models.tar --key ci.key
  epcachectl export --all --pinned --to bundle/ --key ci.key
  epcachectl export --all --pinned --layer image/usr/share/epcached
  epcachectl export mobilenet.onnx --model-package mobilenet/
  epcachectl export --all --to - --key ci.key | ssh device epcachectl import - --trust ci.pub`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := e.check(args); err != nil {
				return err
			}
			return a.WithDaemon(cmd.Context(), func(ctx context.Context, c *unixsock.Client) error {
				return e.run(ctx, c, args)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&e.to, "to", "", "write to `FILE.tar`, DIR or -")
	f.StringVar(&e.layer, "layer", "", "make a read-only store for an image in `DIR`")
	f.StringVar(&e.modelPackage, "model-package", "",
		"make a package for ONNX Runtime itself in `DIR`")
	f.StringVar(&e.key, "key", "", "sign with the private key in `FILE`")
	f.StringVar(&e.facts, "for", "", "also answer requests of the machine of the facts in `FILE`")
	f.StringVar(&e.builder, "builder", "",
		"sign as the machine `NAME`; trusted keys can be limited to such names")
	f.StringVar(&e.notAfter, "not-after", "", "expiry `DATE` of the signature, such as 2027-01-31")
	f.BoolVar(&e.all, "all", false, "every build that you may export")
	f.BoolVar(&e.pinned, "pinned", false, "only pinned builds")
	f.BoolVar(&e.names, "names", false, "with the models' names")
	return cmd
}

// check reads local files before the daemon is asked.
func (e *export) check(args []string) (err error) {
	switch {
	case e.all == (len(args) > 0):
		return exit.Usage(exit.Hint(errors.New("export: name entries, or give --all"),
			"list builds: epcachectl list"))
	case min(len(e.to), 1)+min(len(e.layer), 1)+min(len(e.modelPackage), 1) != 1:
		return exit.Usagef("export: no target: give --to FILE.tar, DIR or -, --layer DIR, or " +
			"--model-package DIR")
	case e.modelPackage != "" && (e.key != "" || e.facts != ""):
		return exit.Usagef("export: --model-package cannot be combined with --key or --for, " +
			"because its format has no place for them")
	case e.key == "" && e.notAfter != "":
		return exit.Usagef("export: --not-after needs --key: it is the expiry of a signature")
	case e.builder != "" && e.key == "":
		return exit.Usagef("export: --builder needs --key: it names the machine that signs")
	case e.to == "-" && e.JSON:
		return exit.Usagef("export: --to - and --json both write to standard output")
	case e.to == "-" && e.Print.Terminal:
		return exit.Usagef(
			"export: standard output is a terminal: send the tar to a file or a program")
	}
	if e.notAfter != "" {
		if e.expires, err = portable.ParseDate(e.notAfter); err != nil {
			return exit.Usagef("--not-after: %v", err)
		}
	}
	if e.key != "" {
		if e.signer, err = portable.ReadSigner(e.key); err != nil {
			return exit.WithOperation("read", e.key, err)
		}
	}
	if e.facts != "" {
		if e.targets, err = readFacts(e.facts); err != nil {
			return err
		}
	}
	return nil
}

// exported is a build in the bundle, with its signed statement.
type exported struct {
	build *wire.Build
	card  *portable.Card
	says  portable.Predicate
}

// target returns the destination.
func (e *export) target() string { return cmp.Or(e.to, e.layer, e.modelPackage) }

func (e *export) run(ctx context.Context, c *unixsock.Client, args []string) error {
	builds, err := e.find(ctx, c, args)
	if err != nil {
		return err
	}
	if e.modelPackage != "" && slices.ContainsFunc(builds, func(b *wire.Build) bool {
		return b.GetModelDigest() != builds[0].GetModelDigest()
	}) {
		return exit.Usagef("export: a model package has the builds of one model: name it")
	}
	dir, finish, remove, err := e.open()
	if err != nil {
		return exit.WithOperation("export to", e.target(), err)
	}
	defer remove()
	if e.writer, err = portable.Create(dir); err != nil {
		return exit.WithOperation("export to", e.target(), err)
	}
	var out []exported
	err = e.WithProgress(func(progress func(*wire.Progress)) error {
		for i, b := range builds {
			card, says, err := e.add(ctx, c, b, func(done int64) {
				progress(&wire.Progress{Phase: "exporting", DoneBytes: done, TotalBytes: sizeOf(b),
					Detail: fmt.Sprintf("build %d of %d", i+1, len(builds))})
			})
			if err != nil {
				return exit.WithOperation("export", term.Short(b.GetBuild()), err)
			}
			out = append(out, exported{b, card, says})
		}
		return nil
	})
	if err == nil && e.layer == "" {
		err = e.addDocuments(ctx, c)
	}
	if err != nil {
		return err
	}
	if err := e.writer.Close(); err != nil {
		return exit.WithOperation("export to", e.target(), err)
	}
	if err = finish(ctx); err == nil && e.layer != "" {
		err = e.makeLayer(ctx, dir, out)
	} else if err == nil && e.modelPackage != "" {
		out, err = e.makeModelPackage(ctx, dir, out)
	}
	if err != nil {
		return exit.WithOperation("export to", e.target(), err)
	}
	return e.report(out)
}

// addDocuments adds the daemon's trust documents to the bundle.
func (e *export) addDocuments(ctx context.Context, c *unixsock.Client) error {
	reply, err := unixsock.Ask[wire.RemoteTrustReply](ctx, c, &wire.RemoteTrust{}, nil)
	if err != nil {
		return exit.WithVerb("export", err)
	}
	for _, raw := range reply.GetDocuments() {
		if err := e.writer.AddDocument(raw); err != nil {
			return exit.WithOperation("export", "trust document", err)
		}
	}
	return nil
}

// find returns the named builds, each once.
func (e *export) find(ctx context.Context, c *unixsock.Client, args []string) (out []*wire.Build,
	err error) {
	seen := make(map[string]bool)
	take := func(builds []*wire.Build) error {
		for _, b := range builds {
			own := b.GetScope() == "shared" || b.GetScope() == c.Hello().GetScope()
			if own && b.GetState() == "current" && (b.GetPinned() || !e.pinned) &&
				!seen[b.GetBuild()] {
				seen[b.GetBuild()] = true
				out = append(out, b)
			}
		}
		return nil
	}
	if e.all {
		err = c.ListPages(ctx, &wire.List{}, nil, take)
	} else {
		entries, err := modelfile.Entries(ctx, args)
		if err != nil {
			return nil, err
		}
		for _, entry := range entries {
			reply, err := unixsock.Ask[wire.ShowReply](ctx, c, &wire.Show{Entry: entry}, nil)
			if err != nil {
				return nil, exit.WithVerb("export", modelfile.AsGiven(err, args, entries))
			}
			if err := take(reply.GetBuilds()); err != nil {
				return nil, err
			}
		}
	}
	if err == nil && len(out) == 0 {
		err = exit.Hint(exit.Missing("export: none of these builds is served and may be exported "+
			"by you"),
			"list builds: epcachectl list")
	}
	return out, err
}

// open returns the directory to make the layout in, a function that converts the layout to the
// format of --to, and one that removes the directory.
func (e *export) open() (dir string, finish func(context.Context) error, remove func(), err error) {
	keep := func(context.Context) error { return nil }
	if e.to != "" && e.to != "-" && !strings.HasSuffix(e.to, ".tar") {
		return e.to, keep, func() {}, nil
	}
	parent := ""
	if e.to != "-" {
		// on the target's file system, which needs the space anyway
		parent = filepath.Dir(filepath.Clean(e.target()))
	}
	if e.to == "" {
		if err = os.MkdirAll(parent, 0o755); err != nil {
			return "", nil, nil, err
		}
	}
	if dir, err = os.MkdirTemp(parent, ".epcachectl-export-"); err != nil {
		return "", nil, nil, err
	}
	remove = func() { _ = os.RemoveAll(dir) } // best effort: it is only a copy
	if e.to == "" {
		return dir, keep, remove, nil
	}
	if e.to == "-" {
		return dir, func(ctx context.Context) error {
			return portable.WriteTar(ctx, e.Print.Out, dir)
		}, remove, nil
	}
	return dir, func(ctx context.Context) error {
		made := filepath.Join(dir, "bundle.tar")
		f, err := os.OpenFile(made, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666)
		if err != nil {
			return err
		}
		err = portable.WriteTar(ctx, f, dir)
		if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
			return err
		}
		return os.Rename(made, e.to)
	}, remove, nil
}

// makeModelPackage makes a model package from the bundle in dir, and returns the builds in it.
func (e *export) makeModelPackage(ctx context.Context, dir string,
	builds []exported) (kept []exported, err error) {
	var all []modelpackage.Build
	by := make(map[*portable.Card]exported)
	for _, b := range builds {
		all, by[b.card] = append(all, modelpackage.Build{Card: b.card, Made: b.says.Issued}), b
	}
	all, warnings := modelpackage.Select(all)
	for _, w := range warnings {
		e.Print.Warning(w)
	}
	for _, b := range all {
		kept = append(kept, by[b.Card])
	}
	return kept, modelpackage.Write(ctx, dir, e.modelPackage, all)
}

// makeLayer verifies the files of the bundle in dir and makes a layer from them.
func (e *export) makeLayer(ctx context.Context, dir string, builds []exported) error {
	from, err := portable.Open(ctx, dir)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := layer.Create(e.layer)
	if err != nil {
		return err
	}
	keyID := ""
	if e.signer != nil {
		keyID = e.signer.ID
	}
	for _, b := range builds {
		if err := to.Add(ctx, from, b.card, b.says, keyID); err != nil {
			return err
		}
	}
	return to.Close()
}

// add adds one build to the bundle, from a lease on its view.
func (e *export) add(ctx context.Context, c *unixsock.Client, b *wire.Build, far func(int64)) (
	card *portable.Card, says portable.Predicate, err error) {
	reply, view, err := c.Export(ctx, b.GetBuild())
	if err != nil {
		return nil, says, err
	}
	defer view.Close()
	root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", view.Fd()))
	if err != nil {
		return nil, says, err
	}
	defer root.Close()
	done := int64(0)
	one := &portable.Build{Signer: e.signer, Copied: func(n int) { done += int64(n); far(done) },
		Says: portable.Predicate{MachineClass: reply.GetMachineClass(), Builder: e.builder,
			NotAfter: e.expires, CompileSeconds: reply.GetCompileSeconds(),
			Issued: time.UnixMilli(reply.GetCreatedMs())}}
	if err := json.Unmarshal(reply.GetConfig(), &one.Config); err != nil {
		return nil, says, fmt.Errorf("the daemon's answer: %w", err)
	}
	if e.names {
		one.Config.ModelName = path.Base(reply.GetModelName())
	}
	if one.Says.Requests, err = requestsFor(one.Config.Record, e.targets); err != nil {
		return nil, says, err
	}
	for _, f := range reply.GetFiles() {
		file, err := root.Open(path.Join(path.Dir(reply.GetGraph()), f.GetName()))
		if err != nil {
			return nil, says, err
		}
		defer file.Close()
		one.Files = append(one.Files,
			portable.Source{Name: f.GetName(), Size: f.GetSize(), From: io.Reader(file)})
	}
	card, err = e.writer.Add(ctx, one)
	if err != nil {
		return nil, says, err
	}
	for i, f := range reply.GetFiles() {
		if got := card.Config.Files[i].Hash.String(); got != f.GetDigest() {
			return nil, says, exit.Damaged(fmt.Errorf("file %q has BLAKE3 %s, not %s", f.GetName(),
				got, f.GetDigest()))
		}
	}
	return card, one.Says, nil
}

func (e *export) report(builds []exported) error {
	if e.JSON {
		list := []any{}
		for _, b := range builds {
			list = append(list, jsonout.Object{"build": b.build.GetBuild(),
				"model_name": b.build.GetModelName(), "ep": b.build.GetEp(),
				"bytes": b.card.Config.Size(), "files": len(b.card.Config.Files),
				"manifest": b.card.Digest.Hex(), "signed": b.card.Signed()})
		}
		return e.Print.JSON(jsonout.Object{"to": e.target(), "builds": list})
	}
	p := e.Print
	if e.to == "-" { // standard output is the bundle
		p = term.NewPrinter(p.Err, p.Err)
	}
	total := int64(0)
	rows := [][]string{{"BUILD", "MODEL", "EP", "SIZE"}}
	for _, b := range builds {
		total += b.card.Config.Size()
		rows = append(rows, []string{term.Short(b.build.GetBuild()), modelColumn(b.build),
			b.build.GetEp(), term.Bytes(b.card.Config.Size())})
	}
	p.Table(rows)
	p.Line("exported %s, %s, to %s", term.Count(len(builds), "build"), term.Bytes(total),
		term.Printable(e.target()))
	if e.signer == nil && e.to != "" {
		e.Print.Warning("the builds are not signed, so no other machine imports them: see --key, " +
			"and epcachectl trust keygen")
	}
	return nil
}
