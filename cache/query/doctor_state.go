package query

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/internal/filestamp"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/evict"
)

// fileSystem has the facts about a directory's file system that the doctor checks.
type fileSystem struct {
	kind              string // "ext4"
	free, size        int64  // bytes, for an ordinary user
	freeInodes        uint64
	inodes            uint64 // 0: it has no fixed number
	readOnly          bool
	timesHold         bool // its times are reliable: unchanged times mean unchanged content
	network, volatile bool
}

type owner struct {
	uid  uint32
	mode fs.FileMode
}

func (d *Doctor) adviseState() []Advice {
	var out []Advice
	if s, err := fileSystemOf(d.q.options.Dir); err != nil {
		out = append(out, problem("disk", "%v", err).hint("the state directory cannot be read; "+
			"is its disk still mounted?"))
	} else {
		out = append(out, adviseDisk(d.q.options.Dir, s)...)
	}
	if info, err := os.Stat(d.q.options.Dir); err != nil {
		out = append(out, problem("rights", "%v", err))
	} else {
		o := owner{uid: cas.Owner(info), mode: info.Mode()}
		out = append(out, adviseRights(d.q.options.Dir, o, d.q.options.UID)...)
	}
	return out
}

// Below these the disk counts as nearly full, because a compile writes a copy of the model and the
// artefact.
const (
	lowBytes  = 1 << 30
	lowInodes = 10_000
)

func adviseDisk(dir string, s fileSystem) []Advice {
	var out []Advice
	const subject = "disk"
	switch {
	case s.readOnly:
		out = append(out, problem(subject, "the file system of %s is mounted read-only: no new "+
			"builds can be stored", dir).
			hint("the kernel may have done that after an error: see its log, and mount it "+
				"writable"))
	case s.free < store.CopyReserve:
		out = append(out, problem(subject, "only %s are free for %s: models that must be copied "+
			"are not compiled, packed builds are not unpacked, and new builds may not be stored",
			bytesize.Text(s.free), dir).
			hint("free some space: epcachectl list shows unused builds, epcachectl rm ENTRY "+
				"removes one"))
	case s.free < lowBytes && s.free < s.size/10:
		out = append(out, warning(subject, "%s are left for %s", bytesize.Text(s.free), dir).
			hint("a compile needs space for a copy of the model and for its result; epcachectl "+
				"rm ENTRY frees some"))
	}
	switch {
	case s.inodes == 0:
	case s.freeInodes < 100:
		out = append(out, problem(subject, "no inodes are left for %s", dir).hint("a directory "+
			"on that file system has very many small files: df -i"))
	case s.freeInodes < lowInodes && s.freeInodes < s.inodes/20:
		out = append(out, warning(subject, "%d inodes are left for %s", s.freeInodes, dir).
			hint("df -i"))
	}
	switch {
	case s.network:
		out = append(out, warning(subject, "%s is on %s, a network file system: its locks and "+
			"syncs may not be reliable", dir, s.kind).
			hint("put the state on a disk of this machine: --state DIR"))
	case s.volatile:
		out = append(out, warning(subject, "%s is on %s: builds are lost when the machine "+
			"restarts", dir, s.kind).
			hint("put the state on a disk: --state DIR"))
	case !s.timesHold:
		out = append(out, warning(subject, "%s is on %s, where file times do not change with "+
			"every write; models there are hashed for each request", dir, s.kind).
			hint("models on ext4, XFS, btrfs or f2fs are hashed once"))
	}
	if len(out) == 0 {
		out = append(out, fine(subject, "%s are free on %s for %s", bytesize.Text(s.free),
			s.kind, dir))
	}
	return out
}

func adviseRights(dir string, o owner, uid uint32) []Advice {
	var out []Advice
	const subject = "rights"
	if o.uid != uid {
		out = append(out, problem(subject, "%s is owned by uid %d, and the daemon runs as uid "+
			"%d", dir, o.uid, uid).
			hint("stop the daemon, then: chown -R %d %s", uid, dir))
	}
	if o.mode&0o022 != 0 {
		out = append(out, problem(subject, "other users may write to %s (mode %#o) and replace "+
			"builds", dir, o.mode.Perm()).
			hint("chmod go-w %s", dir))
	}
	if uid == 0 {
		out = append(out, warning(subject, "the daemon runs as root").
			hint("run it as a user of its own, as systemd/epcached.service does"))
	}
	if len(out) == 0 {
		out = append(out, fine(subject, "%s is writable only by uid %d", dir, uid))
	}
	return out
}

// clockTolerance is how far in the future a file's mtime may be before the doctor warns of a wrong
// clock.
const clockTolerance = time.Minute

func (d *Doctor) adviseClock() Advice {
	now, latest, what := d.q.options.Now(), time.Time{}, ""
	note := func(at time.Time, of string) {
		if at.After(latest) {
			latest, what = at, of
		}
	}
	for _, pattern := range []string{".", "journal", "index.db", "manifests/*", "objects"} {
		found, err := filepath.Glob(filepath.Join(d.q.options.Dir, pattern))
		if err != nil {
			continue // only for a malformed pattern
		}
		for _, path := range found {
			if info, err := os.Stat(path); err == nil { // otherwise removed in the meantime
				note(info.ModTime(), path)
			}
		}
	}
	for _, e := range d.q.index.Journal.Events(now) {
		note(e.At, "the newest event")
	}
	return adviseTime(now, latest, what)
}

func adviseTime(now, latest time.Time, what string) Advice {
	const subject = "clock"
	switch {
	case now.Year() < 2025:
		return problem(subject, "it says %s: it was never set", now.Format(time.DateTime)).
			hint("set it, or wait for the time service; until then ages and times are wrong")
	case latest.After(now.Add(clockTolerance)):
		return warning(subject, "%s is dated %s, which is %s ahead of the "+
			"clock", what, latest.Format(time.DateTime), latest.Sub(now).Round(time.Second)).
			hint("the clock was ahead then, or is behind now; until it catches up, models are " +
				"hashed for each request")
	}
	return fine(subject, "no file has a time in the future")
}

// StateAdvice reports that the state directory was removed or made again.
func (d *Doctor) StateAdvice() []Advice {
	d.q.store.CheckStateDirectory() // now, and not only at the next regular check
	if why := d.q.store.MissingPart(); why != "" {
		return []Advice{problem("state", "%s: %s; new builds are not stored", d.q.options.Dir, why).
			hint("the daemon restores it within seconds, or logs why it cannot")}
	}
	if d.q.options.Rebuilt == "" {
		return nil
	}
	return []Advice{warning("state", "%s was deleted while the daemon ran, and made again: %s; "+
		"missing builds are recompiled", d.q.options.Dir, d.q.options.Rebuilt).
		hint("exclude it from whatever cleans up there; to empty it: epcachectl rm --all")}
}

var fileSystems = map[int64]string{
	0xef53: "ext4", 0x58465342: "XFS", 0x9123683e: "btrfs", 0xf2f52010: "f2fs", 0x01021994: "tmpfs",
	0x858458f6: "ramfs", 0x794c7630: "overlay", 0x6969: "NFS", 0xff534d42: "CIFS",
	0xfe534d42: "SMB", 0x65735546: "FUSE", 0x01021997: "9p", 0x00c36400: "Ceph", 0x2fc12fc1: "ZFS",
	0xe0f5e1e2: "erofs", 0x73717368: "squashfs",
}

func fileSystemOf(path string) (fileSystem, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return fileSystem{}, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	kind, ok := fileSystems[int64(st.Type)]
	if !ok {
		kind = fmt.Sprintf("a file system of type %#x", st.Type)
	}
	s := fileSystem{kind: kind, free: int64(st.Bavail) * st.Bsize,
		size: int64(st.Blocks) * st.Bsize, freeInodes: st.Ffree, inodes: st.Files,
		readOnly: st.Flags&unix.ST_RDONLY != 0, timesHold: filestamp.ReliableTimes(int64(st.Type))}
	switch kind {
	case "NFS", "CIFS", "SMB", "9p", "Ceph":
		s.network = true
	case "tmpfs", "ramfs":
		s.volatile = true
	}
	return s, nil
}

func sysctl(name string) string {
	text, err := os.ReadFile("/proc/sys/" + name)
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(text))
}

const thrashSpan = 7 * 24 * time.Hour

// Thrashing counts the builds that were recently evicted for the budget and then compiled again. It
// does not count builds that were removed by request or for another bound, because a larger budget
// would not have kept them.
func (d *Doctor) Thrashing() evict.Thrashing {
	since := d.q.options.Now().Add(-thrashSpan)
	return evict.FindThrashing(d.q.index.Journal.Tombstones(func(g *index.Tombstone) bool {
		return g.ForBudget && g.At.After(since)
	}), d.madeSince)
}

func (d *Doctor) madeSince(g *index.Tombstone) bool {
	builds, err := d.q.index.Lookup(g.RequestKey, g.Scope)
	return err == nil && slices.ContainsFunc(builds, func(b index.Build) bool {
		return b.Created.After(g.At)
	})
}

// SpaceAdvice warns administrators of too small a budget, and of unkept results.
func (d *Doctor) SpaceAdvice(p rights.Peer) []Advice {
	const subject = "space"
	const raiseFree = "free some space on the disk, or lower free_floor in [space]"
	if !d.q.rights.IsAdministrator(p) {
		return d.adviseUnkept(p)
	}
	r, err := d.q.Space()
	if err != nil {
		return []Advice{warning(subject, "%v", err)}
	}
	var out []Advice
	if t := d.Thrashing(); t.IsSignificant() {
		out = append(out, warning(subject,
			"of %d entries that were evicted in the last 7 days %d were compiled again, for %s",
			t.Evicted, t.Back, bytesize.Seconds(t.Seconds)).
			hint("the budget is too small: %s would have kept them; see budget in [space]",
				bytesize.Text(r.BudgetBytes+t.Bytes)))
	}
	since := d.q.options.Now().Add(-thrashSpan)
	if n := len(d.q.index.Journal.Tombstones(func(g *index.Tombstone) bool {
		return g.ForFloor && g.At.After(since)
	})); n > 0 {
		out = append(out, warning(subject, "the disk was full: builds evicted for free_floor (%s) "+
			"in the last 7 days: %d", bytesize.Text(r.FloorBytes), n).hint(raiseFree))
	}
	used := r.DiskBytes + r.UnpackedBytes + r.ManifestBytes + r.HeldBytes + r.ReservedBytes
	switch {
	case r.BudgetBytes > 0 && used > r.BudgetBytes:
		out = append(out, warning(subject, "%s of a budget of %s are used, and no build can be "+
			"evicted", bytesize.Text(used), bytesize.Text(r.BudgetBytes)).
			hint("epcachectl gc -n lists the builds that cannot be evicted, and why"))
	case r.FloorBytes > 0 && r.FreeBytes < r.FloorBytes:
		out = append(out, warning(subject, "%s are free, and %s must stay free: new builds are "+
			"not stored", bytesize.Text(r.FreeBytes), bytesize.Text(r.FloorBytes)).hint(raiseFree))
	}
	out = append(out, d.adviseUnkept(p)...)
	if len(out) == 0 && r.BudgetBytes > 0 {
		out = append(out, fine(subject, "%s are used of a budget of %s", bytesize.Text(used),
			bytesize.Text(r.BudgetBytes)))
	}
	return out
}

// adviseUnkept lists models that were compiled without storing the build, most often compiled
// first.
func (d *Doctor) adviseUnkept(p rights.Peer) []Advice {
	type lost struct {
		last  *index.Event
		times int
	}
	const subject = "space"
	byKey := make(map[index.RequestKey]*lost)
	all := d.q.index.Journal.Events(d.q.options.Now().Add(-thrashSpan))
	for i := range all {
		if e := &all[i]; e.Kind == event.Unkept && d.q.rights.MaySeeEvent(p, e) {
			if byKey[e.RequestKey] == nil {
				byKey[e.RequestKey] = &lost{}
			}
			byKey[e.RequestKey].last = e
			byKey[e.RequestKey].times++
		}
	}
	var worst []*lost
	for key, l := range byKey {
		if !d.hasBuild(key, l.last.Scope) {
			worst = append(worst, l)
		}
	}
	slices.SortFunc(worst, func(a, b *lost) int {
		return cmp.Or(cmp.Compare(b.times, a.times), b.last.At.Compare(a.last.At),
			strings.Compare(a.last.RequestKey.String(), b.last.RequestKey.String()))
	})
	var out []Advice
	for i, l := range worst {
		if i == maxFindings {
			out = append(out, warning(subject, "and %d more", len(worst)-i).
				hint("epcachectl events shows them: %q", event.Unkept))
			break
		}
		often := "once"
		if l.times > 1 {
			often = fmt.Sprintf("%d times", l.times)
		}
		out = append(out, warning(subject,
			"model %q was compiled %s in the last 7 days and is not stored: %s", l.last.ModelName,
			often, l.last.Text).hint("%s", d.unkeptHint(l.last)))
	}
	return out
}

// hasBuild reports whether the request has a build, shared or in the scope, or the look-up fails.
func (d *Doctor) hasBuild(key index.RequestKey, scope string) bool {
	for _, one := range []string{"shared", scope} {
		if builds, err := d.q.index.Lookup(key, one); err != nil || len(builds) > 0 {
			return true
		}
	}
	return false
}

func (d *Doctor) unkeptHint(e *index.Event) string {
	if hint, ok := memo.Recall[string](&d.q.index.Memos, event.UnkeptKey(e)); ok && hint != "" {
		return hint + " of the daemon's configuration"
	}
	return "epcachectl gc -n lists the builds that cannot be evicted, and why; or raise budget " +
		"in [space] of the daemon's configuration"
}

// adviseLayers reports layers, and builds of layers, that were refused.
func (d *Doctor) adviseLayers() (out []Advice) {
	for _, l := range d.q.store.Layers.States() {
		const subject = "layer"
		switch {
		case l.Err != nil:
			out = append(out, problem(subject, "%s is not used: %v", l.Path, l.Err).
				hint(
					"mount it, or correct [[layer]] in the configuration; until then models are "+
						"compiled"))
		case len(l.Refused) > 0:
			out = append(out, problem(subject, "%s: %d builds are not used: %s", l.Path,
				len(l.Refused), l.Refused[0]).
				hint(
					"make the layer again: epcachectl export --layer; its key has to be one that "+
						"is trusted"))
		default:
			out = append(out, fine(subject, "%s has %d builds", l.Path, l.Builds))
		}
	}
	return out
}

func (d *Doctor) adviseConfiguration() []Advice {
	const subject = "configuration"
	now := d.q.options.Configured()
	var out []Advice
	for _, one := range now.Refused {
		out = append(out, problem(subject, "it has mistakes, so the previous one stays in "+
			"effect: %s", one).
			hint("correct the file; the daemon reads it again when it changes, and upon SIGHUP"))
	}
	if len(now.Waiting) > 0 {
		out = append(out, warning(subject, "changed, and takes effect after a restart: "+
			"%s", strings.Join(now.Waiting, ", ")).
			hint("restart the daemon"))
	}
	if len(out) == 0 {
		out = append(out, fine(subject, "all of it is in effect"))
	}
	return out
}

func adviseLimits() (out []Advice) {
	for _, h := range runtimes.HardLimits {
		if limit, binds := h.Bound(); binds {
			out = append(out, warning("limits", "the daemon has a hard limit on %s: %d", h.What,
				limit).hint("raise it where the daemon is started, and start it again"))
		}
	}
	return out
}

// adviseSandbox warns of safeguards for workers that this machine does not support.
func (d *Doctor) adviseSandbox(ctx context.Context) []Advice {
	const subject = "sandbox"
	measures, err := d.q.options.Sandbox(ctx)
	if err != nil {
		return []Advice{problem(subject, "no worker starts: %v", err).
			withCause(err, "put the worker program beside epcached, of the same version")}
	}
	var out []Advice
	for _, m := range measures {
		if m.InForce {
			out = append(out, fine(subject+" "+m.Name, "%s", m.Text))
		} else {
			out = append(out, warning(subject+" "+m.Name, "%s", m.Text).hint("%s", m.Hint))
		}
	}
	return out
}

func (d *Doctor) adviseSources(ctx context.Context, p rights.Peer) []Advice {
	s, err := d.q.sourceless(ctx, p)
	if err != nil {
		return []Advice{warning("rebuilds", "the builds cannot be listed: %v", err)}
	}
	if s.Builds == 0 {
		return nil
	}
	var why []string
	changeable := false
	for _, one := range s.Why {
		why = append(why, fmt.Sprintf("%d: %s", one.Builds, one.Text))
		changeable = changeable ||
			slices.Contains([]string{index.WhyPrivate, index.WhyClosed, index.WhySwitchedOff},
				one.Text)
	}
	a := fine("rebuilds",
		"%d of %d builds cannot be recompiled in the background, only by a request: %s",
		s.Builds, s.Looked, strings.Join(why, "; "))
	if changeable {
		a.Severity = SeverityWarning
		a = a.hint("let the daemon's user read the models and pass the directories above them, " +
			"or set keep_source = \"copy\"; a build has it from its next compile on")
	}
	return []Advice{a}
}
