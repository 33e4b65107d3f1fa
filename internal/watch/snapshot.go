package watch

import (
	"errors"
	"hash/maphash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// maxLinks bounds the links on the way of one path, as the kernel does.
const maxLinks = 40

// snapshot is a subject as it lay there at one moment.
type snapshot struct {
	// By path, as the links lead to it; with a / behind it: of all entries of a folder.
	stamps    map[string]stamp
	unwatched string // why part of it cannot be watched; "" if all can
}

// takeSnapshot looks at all that the subject's paths lead over, and has each folder on
// the way watched before it looks into it: what changes afterwards is told.
func takeSnapshot(t *folders, s *subject, paths []string) *snapshot {
	k := walker{
		snapshot: &snapshot{stamps: make(map[string]stamp)}, folders: t, subject: s, needs: make(map[int32]need),
		visited: make(map[string]stamp), kinds: make(map[uint64]fsKind), watched: make(map[string]bool),
	}
	for _, p := range paths {
		k.walk(p, true)
	}
	t.watchNeeds(s, k.needs)
	return k.snapshot
}

// walker remembers what it has seen in one look: most paths share their way.
type walker struct {
	*snapshot
	folders *folders
	subject *subject
	needs   map[int32]need // by watch
	visited map[string]stamp
	kinds   map[uint64]fsKind // by device
	watched map[string]bool   // paths of names that are watched or cannot be
}

// walk follows a path one name at a time, as the kernel does, and notes each
// step. If it ends at a folder and whole is set, the folder's entries count.
func (k *walker) walk(path string, whole bool) {
	at, rest := split(path)
	for links := 0; len(rest) > 0; {
		name := rest[0]
		rest = rest[1:]
		if name == ".." {
			at = filepath.Dir(at)
			continue
		}
		kind := k.watchFolder(at, name)
		p := filepath.Join(at, name)
		s := k.lstat(p)
		switch {
		case s.isFolder():
			k.note(p, s.identity(), kind)
			at = p
		case s.isLink():
			k.note(p, s, kind)
			if links++; links > maxLinks {
				return // the path leads nowhere; a switched link is noticed
			}
			root, target := split(s.content)
			if root != "" {
				at = root
			}
			rest = append(target, rest...)
		default:
			if kind.noTimes {
				s = s.withContent(p)
			}
			k.note(p, s, kind)
			return // a file, or nothing there yet; what comes here is noticed
		}
	}
	if whole {
		k.folder(at)
	}
}

// split gives the root, "" if the path is relative, and the names below it.
func split(path string) (root string, names []string) {
	if strings.HasPrefix(path, "/") {
		root = "/"
	}
	for name := range strings.SplitSeq(path, "/") {
		if name != "" && name != "." {
			names = append(names, name)
		}
	}
	return root, names
}

func (k *walker) watchFolder(at, name string) fsKind {
	s := k.lstat(at)
	kind, ok := k.kinds[s.dev]
	if !ok {
		kind = kindOf(at)
		k.kinds[s.dev] = kind
	}
	if of := at + "/" + name; !k.watched[of] {
		k.watched[of] = true
		why := ""
		switch {
		case kind.noEvents != "":
			why = at + ": " + kind.noEvents
		case !s.failed:
			err := k.folders.watchFolder(k.subject, k.needs, at, name)
			if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
				why = err.Error() // else it has gone since it was seen, and the folder above tells that
			}
		}
		if k.unwatched == "" {
			k.unwatched = why
		}
	}
	return kind
}

// folder notes the entries of a folder that a path names, and the way of those that are links.
func (k *walker) folder(at string) {
	if k.watched[at+"/"] {
		return
	}
	kind := k.watchFolder(at, "")
	f, err := os.Open(at)
	if err != nil {
		k.stamps[at+"/"] = failedStamp(err)
		return
	}
	defer f.Close()
	sum := stamp{}
	for {
		names, err := f.Readdirnames(256)
		for _, name := range names {
			p := filepath.Join(at, name)
			s := lstat(p)
			switch {
			case s.isFolder():
				s = s.identity()
			case s.isLink():
				k.walk(p, false)
			}
			if kind.noTimes {
				s = s.withoutTimes()
			}
			sum.ino ^= maphash.Comparable(seed, struct {
				string
				stamp
			}{name, s})
		}
		if err != nil && !errors.Is(err, io.EOF) {
			sum = failedStamp(err)
		}
		if err != nil {
			k.stamps[at+"/"] = sum
			return
		}
	}
}

var seed = maphash.MakeSeed()

func (k *walker) note(path string, s stamp, kind fsKind) {
	if kind.noTimes {
		s = s.withoutTimes()
	}
	k.stamps[path] = s
}

func (k *walker) lstat(path string) stamp {
	s, ok := k.visited[path]
	if !ok {
		s = lstat(path)
		k.visited[path] = s
	}
	return s
}

// changedFrom compares with an earlier look, with common set only the paths that both know.
func (l *snapshot) changedFrom(earlier *snapshot, common bool) bool {
	for p, s := range l.stamps {
		if was, ok := earlier.stamps[p]; ok && was != s || !ok && !common {
			return true
		}
	}
	return !common && len(l.stamps) != len(earlier.stamps)
}
