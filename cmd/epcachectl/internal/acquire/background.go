package acquire

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// mostAsks bounds how often warm asks for one model again whose job is gone when it is to be followed.
const mostAsks = 3

// Warm has the models of the arguments and of a pipeline file compiled, and with follow waits for them.
func (g *Get) Warm(ctx context.Context, args []string, file string, follow bool) error {
	w, err := g.warming(args, file)
	if err != nil {
		return err
	}
	return g.WithDaemon(ctx, func(ctx context.Context, c *unixsock.Client) error {
		if path := w.needsEP(); path != "" {
			err := g.Request.OnlyEP(ctx, c, g.Print)
			if err != nil && file != "" {
				return exit.Failing("warm", path, err) // others have one in the file
			}
			if err != nil {
				return exit.During("warm", err)
			}
		}
		asks, err := w.asks()
		if err != nil {
			return err
		}
		return g.warmAll(ctx, c, asks, w.onMiss, follow && !g.DryRun)
	})
}

// warmAll asks for everything, again for what the daemon had no room for, and prints what came of it.
func (g *Get) warmAll(ctx context.Context, c *unixsock.Client, asks []ask, onMiss wire.OnMiss,
	follow bool) error {
	show := term.NewPhases(g.Print, g.Progress, len(asks))
	results := acquireEach(ctx, c, asks, onMiss, show)
	show.End()
	closeViews(results)
	g.askAgain(ctx, c, asks, results, onMiss)
	if follow {
		g.followAll(ctx, c, asks, results)
	}
	return g.report(eachModel(asks, results))
}

// modelsBelow replaces directories by the models in them. It skips what a compile has written there,
// hidden directories, because they are other programs', and stores, because their models are copies.
func modelsBelow(args []string) ([]string, error) {
	var models []string
	for _, arg := range args {
		info, err := os.Stat(arg)
		if err != nil || !info.IsDir() {
			models = append(models, arg) // what is wrong with it shows when it is opened
			continue
		}
		before := len(models)
		err = filepath.WalkDir(arg, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() && path != arg && (strings.HasPrefix(entry.Name(), ".") || isStore(path)) {
				return fs.SkipDir
			}
			if err == nil && !entry.IsDir() && strings.HasSuffix(path, ".onnx") && !strings.HasSuffix(path, "_ctx.onnx") {
				models = append(models, path)
			}
			return err
		})
		if err != nil {
			return nil, exit.Failing("warm", arg, modelfile.PlainPathError(err))
		}
		if len(models) == before {
			return nil, exit.Failing("warm", arg, exit.Hint(exit.Missing("no model is in it: no *.onnx file that is not *_ctx.onnx"), "name the models themselves if they are called otherwise"))
		}
	}
	return models, nil
}

func isStore(dir string) bool {
	for _, name := range []string{"CACHEDIR.TAG", "manifests", "objects"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err != nil {
			return false
		}
	}
	return true
}

// askAgain asks for what the daemon had no room for, each time after the end of a compile that was asked for before.
func (g *Get) askAgain(ctx context.Context, c *unixsock.Client, asks []ask, results []got,
	onMiss wire.OnMiss) {
	if !slices.ContainsFunc(results, func(r got) bool { return errors.Is(r.err, unixsock.ErrBusy) }) {
		return
	}
	show := term.NewPhases(g.Print, g.Progress, len(results))
	defer show.End()
	var jobs []*got // that may still be under way, in the order in which they were taken
	for i := range results {
		if results[i].reply.GetJob() != "" {
			jobs = append(jobs, &results[i])
		}
	}
	for i := range results {
		r := &results[i]
		for errors.Is(r.err, unixsock.ErrBusy) && len(jobs) > 0 { // else it is not these that take the room
			before := jobs[0]
			jobs = jobs[1:]
			// How it ends is looked at by who follows it; here it only has to.
			_, _ = before.asked(c).Follow(ctx, &wire.Follow{Job: before.reply.GetJob()},
				func(p *wire.Progress) { show.Phase(before.path, p) })
			show.Done(before.path)
			*r = asks[i].acquire(ctx, c, onMiss, show)
			closeViews([]got{*r})
			if r.reply.GetJob() != "" {
				jobs = append(jobs, r)
			}
		}
	}
}

// followAll waits for the jobs among the results, some at a time: they run in the order in which they were asked for.
func (g *Get) followAll(ctx context.Context, c *unixsock.Client, asks []ask, results []got) {
	show := term.NewPhases(g.Print, g.Progress || !g.Print.Terminal && !g.JSON, len(results))
	defer show.End()
	some(len(results), func(i int) {
		r := &results[i]
		if r.err == nil && r.reply.GetJob() != "" {
			asks[i].follow(ctx, c, r, show)
		}
		show.Done(r.path)
	})
}

// follow waits for one job. A job that is not known any more has ended, or went with a daemon that was restarted: asking
// again tells.
func (k ask) follow(ctx context.Context, c *unixsock.Client, r *got, show *term.Phases) {
	for range mostAsks {
		job, err := r.asked(c).Follow(ctx, &wire.Follow{Job: r.reply.GetJob()},
			func(p *wire.Progress) { show.Phase(r.path, p) })
		if err == nil {
			r.job = job
			if failed := JobError(job); failed != nil {
				r.err = exit.Failing("compile", r.path, failed)
			}
			return
		}
		if !errors.Is(err, unixsock.ErrNotFound) {
			r.err = exit.Early(ctx, exit.Failing("follow", r.path, err), k.call.Timeout, func() (string, string) {
				return "", "the compile goes on; wait for it: epcachectl jobs follow " + term.Printable(term.Short(r.reply.GetJob()))
			})
			return
		}
		*r = k.acquire(ctx, c, wire.OnMiss_BACKGROUND, show)
		closeViews([]got{*r})
		if r.err != nil || r.reply.GetJob() == "" {
			return
		}
	}
	r.err = exit.Failing("follow", r.path, errors.New("its job is gone as often as it is asked for; see epcachectl jobs"))
}
