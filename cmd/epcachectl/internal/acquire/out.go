package acquire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
)

type outputCopy struct {
	from   func() (io.ReadCloser, error)
	to     string
	size   int64
	digest string
	graph  bool // it refers to other files, so it is written after them
	same   bool // an equal file exists
}

// copyOut writes the results of the models. It checks all existing files before it writes any. A
// graph exists only beside its own files, also if this process is killed: graphs that are replaced
// are removed first, and graphs are written when the files they refer to are durable.
func (g *Get) copyOut(ctx context.Context, results []modelResult) error {
	var plan []outputCopy
	for _, r := range results {
		if r.missing || r.reportedElsewhere() {
			continue
		}
		files, err := g.planOut(ctx, &r)
		if err != nil {
			return exit.WithOperation("get", r.path, err)
		}
		plan = append(plan, files...)
	}
	slices.SortStableFunc(plan, func(a, b outputCopy) int {
		return map[bool]int{true: 1}[a.graph] - map[bool]int{true: 1}[b.graph]
	})
	for _, c := range plan {
		if c.graph && !c.same && !g.DryRun { // replaced graphs, because their files change first
			if err := cas.Ignore(fs.ErrNotExist, os.Remove(c.to)); err != nil {
				return exit.WithOperation("replace", c.to, err)
			}
		}
	}
	for i, c := range plan {
		if !g.DryRun && c.graph && (i == 0 || !plan[i-1].graph) {
			if err := syncDirs(plan[:i]); err != nil {
				return exit.WithOperation("write", g.out, err)
			}
		}
		did, report := "wrote", !g.JSON && len(g.Program) == 0
		switch {
		case g.DryRun:
			did, report = "would write", !g.JSON && !c.same
		case c.same:
			did = "exists already:"
		default:
			if err := c.write(ctx); err != nil {
				return exit.WithOperation("write", c.to, err)
			}
		}
		if report {
			g.Print.Line("%s %s", did, term.Printable(c.to))
		}
	}
	return nil
}

// syncDirs makes the names of written files durable.
func syncDirs(written []outputCopy) error {
	var dirs []string
	for _, c := range written {
		dirs = append(dirs, filepath.Dir(c.to))
	}
	slices.Sort(dirs)
	return errors.Join(cas.SyncDirs(cas.OS{}, slices.Compact(dirs))...)
}

func (g *Get) planOut(ctx context.Context, r *modelResult) ([]outputCopy, error) {
	if r.queued() {
		return nil, r.errQueued()
	}
	if r.passedThrough() {
		return g.planModel(ctx, r.path)
	}
	base := path.Dir(r.reply.GetGraph())
	var plan []outputCopy
	for _, f := range r.reply.GetFiles() {
		from, err := r.opener(f.GetName())
		if err != nil {
			return nil, err
		}
		name, err := filepath.Rel(filepath.FromSlash(base), filepath.FromSlash(f.GetName()))
		if err != nil || !filepath.IsLocal(name) {
			return nil, fmt.Errorf("the daemon names a file %q that is not beside the graph",
				f.GetName())
		}
		if f.GetDigest() == "" { // unkept files have no digests
			path, err := r.filePath(f.GetName())
			if err != nil {
				return nil, err
			}
			if f, err = describeFile(ctx, func() (*os.File, error) {
				return os.Open(path)
			}); err != nil {
				return nil, err
			}
		}
		c := outputCopy{from: from, to: filepath.Join(g.out, name), size: f.GetSize(),
			digest: f.GetDigest(), graph: r.isGraph(f.GetName())}
		if plan, err = g.add(ctx, plan, c); err != nil {
			return nil, err
		}
	}
	return plan, nil
}

func (g *Get) planModel(ctx context.Context, path string) (plan []outputCopy, err error) {
	m, err := modelfile.Open(path)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	names, err := m.References(ctx)
	if err != nil {
		return nil, err
	}
	for i, name := range append([]string{filepath.Base(path)}, names...) {
		f, err := describeFile(ctx, func() (*os.File, error) { return m.External(name) })
		if err != nil {
			return nil, err
		}
		c := outputCopy{to: filepath.Join(g.out, filepath.FromSlash(name)), size: f.GetSize(),
			digest: f.GetDigest(), graph: i == 0}
		c.from = func() (io.ReadCloser, error) {
			m, err := modelfile.Open(path)
			if err != nil {
				return nil, err
			}
			defer m.Close()
			return m.External(name)
		}
		if plan, err = g.add(ctx, plan, c); err != nil {
			return nil, err
		}
	}
	return plan, nil
}

func (g *Get) add(ctx context.Context, plan []outputCopy, c outputCopy) (_ []outputCopy,
	err error) {
	if c.same, err = c.isUpToDate(ctx); err != nil {
		return nil, err
	}
	if !c.same && !g.force {
		if _, err := os.Lstat(c.to); err == nil {
			return nil, exit.Hint(fmt.Errorf("%q exists and differs", c.to),
				"replace it with -f, or use another --out")
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return append(plan, c), nil
}

// isUpToDate compares the bytes with an existing file.
func (c *outputCopy) isUpToDate(ctx context.Context) (bool, error) {
	info, err := os.Lstat(c.to)
	if err != nil || !info.Mode().IsRegular() || info.Size() != c.size {
		return false, nil // missing, or to be replaced; writing reports errors
	}
	have, err := os.Open(c.to)
	if err != nil {
		return false, err
	}
	defer have.Close()
	digest, err := cas.Sum(ctx, have, 0, c.size)
	return digest.String() == c.digest, err
}

// write makes the copy, and renames it to its name only when it is complete and its digest
// verified.
func (c *outputCopy) write(ctx context.Context) error {
	dir := filepath.Dir(c.to)
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	temporary, err := os.CreateTemp(dir, ".epcachectl-*")
	if err != nil {
		return err
	}
	defer os.Remove(temporary.Name()) // fails after the rename
	if err := errors.Join(c.fill(ctx, temporary), temporary.Close()); err != nil {
		return err
	}
	return os.Rename(temporary.Name(), c.to)
}

func (c *outputCopy) fill(ctx context.Context, to *os.File) error {
	from, err := c.from()
	if err != nil {
		return err
	}
	defer from.Close()
	n, err := io.Copy(to, from)
	if err != nil {
		return err
	}
	got, err := cas.Sum(ctx, to, 0, n)
	if err != nil {
		return err
	}
	if got.String() != c.digest {
		want, err := cas.ParseDigest(c.digest)
		return errors.Join(err, &cas.CorruptError{Digest: want, Got: got})
	}
	return errors.Join(to.Chmod(0o644), to.Sync())
}
