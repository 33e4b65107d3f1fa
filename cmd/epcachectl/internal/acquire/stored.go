package acquire

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/readonly"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// checkStored returns an error for flags that need a daemon.
func (g *Get) checkStored() error {
	const none = " needs a daemon, which --state does not use"
	with := g.state != ""
	return cmp.Or(
		usageMistake(!with && g.build != "", "--build needs --state: a daemon chooses the build "+
			"itself", ""),
		usageMistake(!with && g.unpackDir != "",
			"--unpack-to needs --state: a daemon unpacks to its configured directory", ""),
		usageMistake(with && g.Socket != "", "--socket"+none, ""),
		usageMistake(with && g.keepGoing, "--keep-going"+none, ""),
		usageMistake(with && g.Request.ortVersion != "", "--ort-version"+none, ""),
		usageMistake(with && g.Request.strictORT, "--strict-ort"+none, ""),
		usageMistake(with && g.Request.Verify != 0, "--verify-output"+none, ""),
		usageMistake(with && g.Request.store != "", "--store"+none, ""),
		usageMistake(with && g.OnMiss != "wait" &&
			g.OnMiss != "fail", "--on-miss "+g.OnMiss+none, ""),
	)
}

func (g *Get) openStore(ctx context.Context) (err error) {
	if g.stored, err = readonly.Open(ctx, g.state, uint32(os.Getuid())); err != nil {
		return exit.WithOperation("read", g.state, storedError(err))
	}
	for _, problem := range g.stored.Problems() {
		g.Print.Warning(fmt.Sprintf("read %q: %s", g.state, problem))
	}
	return nil
}

// find searches the store, and retries with the external data that the models refer to.
func (g *Get) find(ctx context.Context, w *wire.Acquire, files []*os.File,
	external unixsock.External,
	progress func(*wire.Progress), out *modelResult) error {
	request, err := request.FromWire(request.Peer{}, w, files)
	if err != nil {
		return err
	}
	answer, err := g.stored.Find(ctx, request, g.build)
	if need, is := errors.AsType[*identity.NeedFilesError](err); is {
		for i, location := range need.Locations {
			member := 0
			if len(need.Members) > 0 {
				member = need.Members[i]
			}
			f, err := external(member, location)
			if err != nil {
				return err
			}
			defer f.Close()
			if member == 0 {
				request.External[location] = f
			} else {
				request.Group[member-1].External[location] = f
			}
		}
		answer, err = g.stored.Find(ctx, request, g.build)
	}
	if err != nil {
		return err
	}
	if answer.Build != nil && answer.View == nil && !g.DryRun && !g.copies() {
		if err := g.unpack(ctx, answer, progress); err != nil {
			return err
		}
	}
	out.reply, out.view, out.graph = answer.Reply(), answer.View, answer.Graph
	if answer.Build != nil && answer.View == nil { // copy its files from the store
		out.blobs = make(map[string]func() (io.ReadCloser, error))
		for _, f := range answer.Build.Files {
			out.blobs[f.Name] = func() (io.ReadCloser, error) {
				in, err := g.stored.Open(answer, f)
				return in, storedError(err)
			}
		}
	}
	return nil
}

// unpack makes a view, in the first usable directory, for a build without one in the store.
func (g *Get) unpack(ctx context.Context, answer *request.Answer,
	progress func(*wire.Progress)) (err error) {
	for _, dir := range g.unpackDirs() {
		err = g.stored.Unpack(ctx, answer, dir, func(done, total int64) {
			progress(&wire.Progress{Phase: "unpacking", DoneBytes: done, TotalBytes: total})
		})
		if class := apierr.ClassOf(err); err == nil || class != apierr.NotAllowed &&
			class != apierr.NoSpace {
			break
		}
	}
	return err
}

// unpackDirs lists the directories for unpacking a build: the flag's, otherwise the user's cache
// directory and the temporary one.
func (g *Get) unpackDirs() (dirs []string) {
	if g.unpackDir != "" {
		return []string{g.unpackDir}
	}
	// XDG_CACHE_HOME, or ~/.cache
	if dir, err := os.UserCacheDir(); err == nil && filepath.IsAbs(dir) {
		dirs = append(dirs, filepath.Join(dir, "epcached", "unpacked"))
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		dirs = append(dirs, filepath.Join(dir, "epcached-unpacked"))
	}
	return append(dirs, filepath.Join(os.TempDir(),
		fmt.Sprintf("epcached-unpacked-%d", os.Getuid())))
}

// storedError converts the cache's errors to those that a daemon would send, for the exit codes.
func storedError(err error) error {
	e, is := errors.AsType[*apierr.Error](err)
	switch {
	case !is && packing.IsMissingOrDamaged(err):
		return exit.Damaged(err)
	case !is:
		return modelfile.PlainPathError(err)
	}
	return &unixsock.Error{Class: wire.ErrorClass(e.Class), Text: e.Text, Hint: e.Hint,
		Facts: e.Facts, Err: err}
}
