package watch

import (
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// ways are the ways in which files change. Each begins with a directory that
// before has filled; the subject is paths; afterwards the file end is written
// again, which must be noticed as well.
var ways = []struct {
	name   string
	before func(r *rig)
	paths  []string
	change func(r *rig)
	end    string
	// the final state is the first one, as far as stamps say: only events show the change
	undone bool
}{
	{"written in place", file, []string{"lib/ep.so"}, func(r *rig) { r.write("lib/ep.so", "two") },
		"lib/ep.so", false},
	{"appended to", file, []string{"lib/ep.so"},
		func(r *rig) { r.write("lib/ep.so", "one and more") }, "lib/ep.so", false},
	{"truncated", file, []string{"lib/ep.so"},
		func(r *rig) { require.NoError(r.t, os.Truncate(r.path("lib/ep.so"), 1)) }, "lib/ep.so",
		false},
	{"mode changed", file, []string{"lib/ep.so"},
		func(r *rig) { require.NoError(r.t, os.Chmod(r.path("lib/ep.so"), 0o600)) }, "lib/ep.so",
		false},
	{"times set back", file, []string{"lib/ep.so"}, func(r *rig) {
		require.NoError(r.t, os.Chtimes(r.path("lib/ep.so"), time.Unix(0, 0), time.Unix(0, 0)))
	}, "lib/ep.so", false},
	{"deleted", file, []string{"lib/ep.so"}, func(r *rig) { r.remove("lib/ep.so") }, "lib/ep.so",
		false},
	{"deleted and created", file, []string{"lib/ep.so"}, func(r *rig) {
		r.remove("lib/ep.so")
		r.write("lib/ep.so", "two")
	}, "lib/ep.so", false},
	{"replaced by rename", file, []string{"lib/ep.so"}, func(r *rig) {
		r.write("lib/.ep.so.dpkg-new", "two")
		r.rename("lib/.ep.so.dpkg-new", "lib/ep.so")
	}, "lib/ep.so", false},
	{"renamed away", file, []string{"lib/ep.so"},
		func(r *rig) { r.rename("lib/ep.so", "lib/ep.so.old") }, "lib/ep.so", false},
	{"a file where a directory was", func(r *rig) { r.write("lib/ep/one.so", "one") },
		[]string{"lib/ep/one.so"}, func(r *rig) {
			r.remove("lib/ep")
			r.write("lib/ep", "a file")
			r.remove("lib/ep")
		}, "lib/ep/one.so", false},

	{"link switched", linked, []string{"lib/libfoo.so"},
		func(r *rig) { r.relink("libfoo.so.3", "lib/libfoo.so") }, "lib/libfoo.so.3", false},
	{"link removed and made", linked, []string{"lib/libfoo.so"}, func(r *rig) {
		r.remove("lib/libfoo.so")
		r.link("libfoo.so.3", "lib/libfoo.so")
	}, "lib/libfoo.so.3", false},
	{"what a link leads to, written", linked, []string{"lib/libfoo.so"},
		func(r *rig) { r.write("lib/libfoo.so.2", "two") }, "lib/libfoo.so.2", false},
	{"link replaced by a file", linked, []string{"lib/libfoo.so"}, func(r *rig) {
		r.remove("lib/libfoo.so")
		r.write("lib/libfoo.so", "plain")
	}, "lib/libfoo.so", false},
	{"second link of a chain switched", chained, []string{"app/ep.so"},
		func(r *rig) { r.relink("v2/ep.so", "alternatives/ep") }, "alternatives/v2/ep.so", false},
	{"what a chain leads to, written", chained, []string{"app/ep.so"},
		func(r *rig) { r.write("alternatives/v1/ep.so", "two") }, "alternatives/v1/ep.so", false},
	{"directory link switched", current, []string{"ort/current/lib/ep.so"},
		func(r *rig) { r.relink("1.32", "ort/current") }, "ort/1.32/lib/ep.so", false},
	{"directory link switched there and back", current, []string{"ort/current/lib/ep.so"},
		func(r *rig) {
			r.relink("1.32", "ort/current")
			r.relink("1.31", "ort/current")
		}, "ort/1.31/lib/ep.so", true},
	{"behind a directory link, written", current, []string{"ort/current/lib/ep.so"},
		func(r *rig) { r.write("ort/1.31/lib/ep.so", "two") }, "ort/1.31/lib/ep.so", false},
	{"behind .. of a link, written", current, []string{"ort/current/../beside.so"},
		func(r *rig) { r.write("ort/beside.so", "two") }, "ort/beside.so", false},
	{"links in a circle, then not", func(r *rig) {
		r.link("b", "a")
		r.link("a", "b")
		r.write("c", "one")
	}, []string{"a"}, func(r *rig) { r.relink("c", "b") }, "c", false},
	{"dangling link, then not", func(r *rig) { r.link("there/ep.so", "ep.so") }, []string{"ep.so"},
		func(r *rig) { r.write("there/ep.so", "one") }, "there/ep.so", false},

	{"directory renamed away", venv, []string{"venv/lib/ep.so"},
		func(r *rig) { r.rename("venv", "venv.old") }, "venv/lib/ep.so", false},
	{"directory renamed away and back", venv, []string{"venv/lib/ep.so"}, func(r *rig) {
		r.rename("venv", "venv.old")
		r.rename("venv.old", "venv")
	}, "venv/lib/ep.so", true},
	{"directory renamed away, another put there", venv, []string{"venv/lib/ep.so"}, func(r *rig) {
		r.rename("venv", "venv.old")
		r.rename("venv.new", "venv")
	}, "venv/lib/ep.so", false},
	{"inner directory renamed away, another put there", venv, []string{"venv/lib/ep.so"},
		func(r *rig) {
			r.rename("venv/lib", "venv/lib.old")
			r.rename("venv.new/lib", "venv/lib")
		}, "venv/lib/ep.so", false},
	{"directory replaced by a link", venv, []string{"venv/lib/ep.so"}, func(r *rig) {
		r.rename("venv", "venv.old")
		r.link("venv.new", "venv")
	}, "venv.new/lib/ep.so", false},
	{"directory removed and made", venv, []string{"venv/lib/ep.so"}, func(r *rig) {
		r.remove("venv")
		r.write("venv/lib/ep.so", "two")
	}, "venv/lib/ep.so", false},
	{"directory removed while somebody has it open", func(r *rig) {
		venv(r)
		f, err := os.Open(r.path("venv/lib"))
		require.NoError(r.t, err)
		r.t.Cleanup(func() { f.Close() })
	}, []string{"venv/lib/ep.so"}, func(r *rig) {
		r.remove("venv")
		r.write("venv/lib/ep.so", "two")
	}, "venv/lib/ep.so", false},
	{"directory may not be passed", venv, []string{"venv/lib/ep.so"}, func(r *rig) {
		require.NoError(r.t, os.Chmod(r.path("venv"), 0))
		require.NoError(r.t, os.Chmod(r.path("venv"), 0o755))
	}, "venv/lib/ep.so", true},
	{"directories that did not exist", nothing, []string{"a/b/c/ep.so"},
		func(r *rig) { r.write("a/b/c/ep.so", "one") }, "a/b/c/ep.so", false},
	{"directories that came one by one", nothing, []string{"a/b/ep.so"}, func(r *rig) {
		r.mkdir("a")
		r.mkdir("a/b")
	}, "a/b/ep.so", true},

	{"in a directory of the subject's, added", whole, []string{"sdk"},
		func(r *rig) { r.write("sdk/new.so", "one") }, "sdk/new.so", false},
	{"in a directory of the subject's, removed", whole, []string{"sdk"},
		func(r *rig) { r.remove("sdk/a.so") }, "sdk/b.so", false},
	{"in a directory of the subject's, written", whole, []string{"sdk"},
		func(r *rig) { r.write("sdk/b.so", "two") }, "sdk/b.so", false},
	{"in a directory of the subject's, a link's end written", whole, []string{"sdk"},
		func(r *rig) { r.write("store/c.so", "two") }, "store/c.so", false},
	{"in a directory of the subject's, a link's way switched", whole, []string{"sdk"},
		func(r *rig) {
			r.write("store.new/c.so", "two")
			r.rename("store", "store.old")
			r.rename("store.new", "store")
		}, "store/c.so", false},
	{"a directory of the subject's, through a link that is switched", current,
		[]string{"ort/current/lib"}, func(r *rig) { r.relink("1.32", "ort/current") },
		"ort/1.32/lib/new.so", false},
	{"a directory of the subject's, not there yet", nothing, []string{"sdk"},
		func(r *rig) { r.write("sdk/a.so", "one") }, "sdk/b.so", false},
}

func nothing(*rig) {}

func file(r *rig) { r.write("lib/ep.so", "one") }

func linked(r *rig) {
	r.write("lib/libfoo.so.2", "one")
	r.write("lib/libfoo.so.3", "three")
	r.link("libfoo.so.2", "lib/libfoo.so")
}

func chained(r *rig) {
	r.write("alternatives/v1/ep.so", "one")
	r.write("alternatives/v2/ep.so", "two")
	r.link("v1/ep.so", "alternatives/ep")
	r.link(r.path("alternatives/ep"), "app/ep.so")
}

func current(r *rig) {
	r.write("ort/1.31/lib/ep.so", "one")
	r.write("ort/1.32/lib/ep.so", "two")
	r.write("ort/beside.so", "one")
	r.link("1.31", "ort/current")
}

func venv(r *rig) {
	r.write("venv/lib/ep.so", "one")
	r.write("venv.new/lib/ep.so", "two")
}

func whole(r *rig) {
	r.write("sdk/a.so", "one")
	r.write("sdk/b.so", "one")
	r.write("store/c.so", "one")
	r.link("../store/c.so", "sdk/c.so")
}

func TestEveryWayToChangeIsNoticed(t *testing.T) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			way.before(r)
			r.set("ep", way.paths...)
			require.Equal(t, "inotify", r.how("ep"))

			// The look after the first event may find the second directory, which has no stamp.
			r.passing = way.name == "directories that came one by one"
			r.notices("ep", func() { way.change(r) })
			r.passing = false
			require.Equal(t, "inotify", r.how("ep"))

			r.notices("ep", func() { r.write(way.end, "afterwards") })
			r.notices("ep", func() { r.write(way.end, "and again") })
			r.calm()
		})
	}
}

// Where the kernel reports nothing, stamps find the same changes, but for those that were undone
// before anybody looked.
func TestEveryWayToChangeIsNoticedByPolling(t *testing.T) {
	for _, way := range ways {
		if way.undone {
			continue
		}
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.openErr = syscall.EMFILE
			way.before(r)
			r.set("ep", way.paths...)
			require.Contains(t, r.how("ep"), "polled: ")

			r.passing = way.name == "a file where a directory was"
			r.notices("ep", func() { way.change(r) })
			r.passing = false
			r.notices("ep", func() { r.write(way.end, "afterwards") })
		})
	}
}
