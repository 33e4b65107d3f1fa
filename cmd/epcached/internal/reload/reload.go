// Package reload applies a changed configuration while the daemon runs.
package reload

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cmd/epcached/internal/systemd"
	"github.com/epcached/epcached/internal/config"
	"github.com/epcached/epcached/internal/watch"
)

// Reader reads the configuration and the rules that it names, as at the start. If it returns
// settings without rules, the error is in the rules.
type Reader func() (*config.Settings, *rules.Set, error)

// Reloader applies a changed configuration while the daemon runs. If one file has an error, no part
// of the change is applied.
type Reloader struct {
	Read        Reader
	Options     func(*config.Settings, *rules.Set) cache.Options
	Cache       *cache.Cache
	Level       *slog.LevelVar
	Log         *slog.Logger
	watcher     *watch.Watcher
	watched     []string
	initOnce    bool             // the file is a pipe or similar, which can be read only once
	Started     *config.Settings // settings of the start, because some fields take effect only then
	Active      *config.Settings
	Rules       *rules.Set
	waiting     []string // fields that take effect at the next start
	refusedText string   // the last logged error; "": none
}

const configuration = "configuration"

// Follow watches and applies changes until stop is called, which waits for its end.
func (r *Reloader) Follow(ctx context.Context, hangup <-chan os.Signal) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	r.watcher = watch.New(watch.Options{Log: r.Log})
	if info, err := os.Stat(r.Started.File); err == nil && !info.Mode().IsRegular() {
		r.Log.Info("the configuration is not a regular file, so it is not "+
			"reloaded", "file", r.Started.File)
		r.initOnce = true
	}
	var work sync.WaitGroup
	work.Go(func() {
		if r.watchFiles(nil) {
			r.reload(false) // it may have changed since it was read
		}
		for {
			select {
			case <-ctx.Done():
				return
			case <-hangup:
				r.Log.Info("reloading the configuration", "why", "SIGHUP")
				r.reload(true)
			case e := <-r.watcher.Events():
				if e.Kind == watch.Settled {
					r.reload(true)
				}
			}
		}
	})
	return sync.OnceFunc(func() {
		cancel()
		work.Wait()
		_ = r.watcher.Close() // the watcher only reads
	})
}

// rereadFiles reads as at the start, but never blocks on a FIFO.
func (r *Reloader) rereadFiles() (*config.Settings, *rules.Set, error) {
	file := r.Started.File
	if info, err := os.Stat(file); !r.initOnce && err == nil && !info.Mode().IsRegular() {
		return nil, nil, fmt.Errorf("configuration %s: not a regular file", file)
	}
	if !r.initOnce {
		return r.Read()
	}
	set, err := r.Started.LoadRules()
	return r.Started, set, err
}

// watchFiles watches the files of the settings in effect, and those of others, which may have
// errors to be fixed. It reports whether the set of files changed.
func (r *Reloader) watchFiles(others *config.Settings) bool {
	var paths []string
	for _, s := range []*config.Settings{r.Active, others} {
		if s != nil && s.File != "" && !r.initOnce {
			paths = append(paths, s.File)
		}
		if s != nil {
			paths = append(paths, s.Rules...)
		}
	}
	slices.Sort(paths)
	paths = slices.Compact(paths)
	if slices.Equal(paths, r.watched) {
		return false
	}
	r.watcher.Set(configuration, paths)
	r.watched = paths
	return true
}

// reload reads all files, and applies them or logs the errors. With notify it reports to systemd.
func (r *Reloader) reload(notify bool) {
	if notify {
		systemd.Notify(r.Log,
			strings.TrimSpace(daemon.SdNotifyReloading+"\n"+daemon.SdNotifyMonotonicUsec()))
	}
	s, set, err := r.rereadFiles()
	for round := 0; round < maxRounds && r.watchFiles(s); round++ {
		s, set, err = r.rereadFiles() // a change before the watch was not noticed
	}
	if err == nil {
		err = r.Cache.Reload(r.Options(s, set))
	}
	status := "STATUS="
	if err == nil {
		r.accept(s, set)
	} else {
		r.noteRefused(err)
		status += "the configuration has mistakes, so the previous one stays in effect"
	}
	if notify {
		systemd.Notify(r.Log, daemon.SdNotifyReady+"\n"+status)
	}
}

// maxRounds bounds how often a configuration that names other files each time is read.
const maxRounds = 3

func (r *Reloader) accept(s *config.Settings, set *rules.Set) {
	changed, _ := differences(r.Active, s)
	if !set.Equal(r.Rules) && !slices.Contains(changed, "rules") {
		changed = append(changed, "rules")
	}
	_, waiting := differences(r.Started, s)
	news := len(changed) > 0 || r.refusedText != "" || !slices.Equal(waiting, r.waiting)
	r.Active, r.Rules, r.refusedText, r.waiting = s, set, "", waiting
	r.watchFiles(nil)
	r.Level.Set(s.Level())
	r.Cache.SetConfigured(query.Configured{Waiting: r.waiting})
	if !news {
		return
	}
	LogWarnings(r.Log, s)
	r.Log.Info("configuration "+
		"reloaded", "in_force_now", strings.Join(changed, ", "), "at_the_next_start",
		strings.Join(r.waiting, ", "))
	text := "reloaded; no value in effect has changed"
	if len(changed) > 0 {
		text = "changed and in effect: " + strings.Join(changed, ", ")
	}
	if len(waiting) > 0 {
		text += "; takes effect after a restart: " + strings.Join(waiting, ", ")
	}
	r.Cache.RecordConfiguration(text)
}

const maxRefused = 20

// noteRefused logs the errors. The configuration in effect is kept.
func (r *Reloader) noteRefused(err error) {
	text := err.Error()
	lines := strings.Split(text, "\n")
	if len(lines) > maxRefused {
		lines = append(lines[:maxRefused], "and more")
	}
	for _, line := range lines {
		r.Log.Error("configuration has mistakes, so the previous one stays in "+
			"effect", "error", line)
	}
	r.Cache.SetConfigured(query.Configured{Refused: lines, Waiting: r.waiting})
	if text != r.refusedText {
		r.Cache.RecordConfiguration("it has mistakes, so the previous one stays in effect: " +
			"" + strings.Join(lines, "; "))
	}
	r.refusedText = text
}

// immediateFields take effect while the daemon runs. All others wait for the next start.
var immediateFields = []string{"log_level", "administrators", "publishers", "allow_options",
	"rules", "trust", "signing_key", "remote", "layer", "keep_source", "runtime", "driver",
	"policy", "rebuild", "space"}

// differences returns the fields that have other values: those that may change at run time, and
// those that may not. Fields in an array of tables are represented by the array's name.
func differences(before, now *config.Settings) (changed, waiting []string) {
	old, fresh := values(before), values(now)
	var names []string
	for _, f := range slices.Concat(before.Fields(), now.Fields()) {
		was, had := old[f.Name]
		is, has := fresh[f.Name]
		name, _, _ := strings.Cut(f.Name, "[")
		if (had != has || !reflect.DeepEqual(was, is)) && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, name := range names {
		if top, _, _ := strings.Cut(name, "."); slices.Contains(immediateFields, top) ||
			slices.Contains(immediateFields, name) {
			changed = append(changed, name)
		} else {
			waiting = append(waiting, name)
		}
	}
	return changed, waiting
}

func values(s *config.Settings) map[string]any {
	out := make(map[string]any)
	for _, f := range s.Fields() {
		out[f.Name] = f.Value
	}
	return out
}

// LogWarnings logs the fields of a configuration that have no effect any more.
func LogWarnings(log *slog.Logger, s *config.Settings) {
	for _, w := range s.Warnings() {
		log.Warn("configuration", "warning", w.Error())
	}
}
