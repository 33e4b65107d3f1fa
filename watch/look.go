package watch

import (
	"errors"
	"hash/maphash"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const (
	maxLinks   = 40      // links on the way of one path, as many as the kernel follows
	maxEntries = 1 << 14 // entries of one subject whose stamps are kept one by one
	maxPaths   = 16      // in an Event
	separator  = string(filepath.Separator)
)

// look is a subject as it lay there at one moment.
type look struct {
	stamps map[string]stamp // by path, as the links lead to it
	more   uint64           // over the stamps of the entries beyond maxEntries
	needs  map[folderID]*need
	deaf   string // why part of it cannot be watched; "" if all can
	uneasy bool   // it was being changed while we looked
	grew   bool   // some of it came under watch with this look
}

// need is what a subject has to hear of one folder.
type need struct {
	path  string // one that leads there, without links
	names map[string]bool
	whole bool // any entry
}

// take looks at all that the paths lead over. It changes nothing and asks for
// no watch.
func take(paths []string) *look {
	k := walker{
		look:  &look{stamps: make(map[string]stamp), needs: make(map[folderID]*need)},
		seen:  make(map[string]stamp),
		kinds: make(map[uint64]fsKind), listed: make(map[string]bool),
	}
	for _, p := range paths {
		k.walk(p, true)
	}
	return k.look
}

// walker remembers what it has seen in one look: most paths share their way.
type walker struct {
	*look
	seen    map[string]stamp
	kinds   map[uint64]fsKind // by device
	listed  map[string]bool   // folders whose entries are noted
	entries int
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
		kind := k.hear(at, name)
		p := filepath.Join(at, name)
		s := k.lstat(p)
		switch {
		case s.isFolder():
			k.note(p, s.identity(), kind)
			at = p
		case s.isLink():
			k.note(p, s, kind)
			if links++; links > maxLinks {
				return // nobody gets through; a link that is switched is noticed
			}
			root, target := split(s.says)
			if root != "" {
				at = root
			}
			rest = append(target, rest...)
		default:
			if kind.timeless {
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
	volume := filepath.VolumeName(path)
	rest := filepath.ToSlash(path[len(volume):])
	if strings.HasPrefix(rest, "/") {
		root = volume + separator
	}
	for name := range strings.SplitSeq(rest, "/") {
		if name != "" && name != "." {
			names = append(names, name)
		}
	}
	return root, names
}

// hear notes that the subject must hear of a name in a folder.
func (k *walker) hear(at, name string) fsKind {
	kind := k.kind(at)
	if n := k.need(at, kind); n != nil {
		n.names[name] = true
	}
	return kind
}

// need gives what is needed of a folder so far; nil where nothing can be heard.
func (k *walker) need(at string, kind fsKind) *need {
	s := k.lstat(at)
	if kind.deaf != "" || s.failed {
		if k.deaf == "" && kind.deaf != "" {
			k.deaf = at + ": " + kind.deaf
		}
		return nil
	}
	id := s.id(at)
	n, ok := k.needs[id]
	if !ok {
		n = &need{path: at, names: make(map[string]bool)}
		k.needs[id] = n
	}
	return n
}

// folder notes a folder that a path names, and all its entries.
func (k *walker) folder(at string) {
	if k.listed[at] {
		return
	}
	k.listed[at] = true
	kind := k.kind(at)
	if n := k.need(at, kind); n != nil {
		n.whole = true
	}
	delete(k.stamps, at) // more of it counts now than when it was only passed
	k.note(at, k.lstat(at), kind)
	f, err := os.Open(at)
	if err != nil {
		k.stamps[at] = failedStamp(err)
		return
	}
	defer f.Close()
	for {
		names, err := f.Readdirnames(256)
		for _, name := range names {
			k.entry(at, name, kind)
		}
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			k.stamps[at] = failedStamp(err)
			return
		}
	}
}

// entry notes an entry of a folder that counts as a whole. A link's way counts
// as well; a folder only by being there.
func (k *walker) entry(at, name string, kind fsKind) {
	p := filepath.Join(at, name)
	if _, ok := k.stamps[p]; ok {
		return
	}
	if k.entries++; k.entries > maxEntries {
		k.more ^= maphash.Comparable(seed, struct {
			path string
			stamp
		}{p, lstat(p)})
		return
	}
	s := k.lstat(p)
	switch {
	case s.isMissing():
		k.uneasy = true // gone since it was listed
	case s.isFolder():
		k.note(p, s.identity(), kind)
	case s.isLink():
		k.walk(p, false)
	default:
		k.note(p, s, kind)
	}
}

var seed = maphash.MakeSeed()

// note keeps the stamp of a step. What was noted first stays: a folder that
// counts as a whole may also be on the way of another path.
func (k *walker) note(path string, s stamp, kind fsKind) {
	if _, ok := k.stamps[path]; ok {
		return
	}
	if kind.timeless {
		s = s.timeless()
	}
	k.stamps[path] = s
}

func (k *walker) lstat(path string) stamp {
	s, ok := k.seen[path]
	if !ok {
		s = lstat(path)
		k.seen[path] = s
	}
	return s
}

// kind tells what file system a folder lies on. One that is gone since is of no
// kind: the next look finds that.
func (k *walker) kind(at string) fsKind {
	s := k.lstat(at)
	kind, ok := k.kinds[s.dev]
	if !ok {
		var err error
		if kind, err = kindOf(at); err != nil {
			k.uneasy = true
			return fsKind{}
		}
		k.kinds[s.dev] = kind
	}
	return kind
}

// differences lists some of the paths that are not what they were. With common
// set, paths that only one of the looks knows do not count.
func (l *look) differences(earlier *look, common bool) (paths []string, differ bool) {
	add := func(p string) {
		differ = true
		if len(paths) < maxPaths {
			paths = append(paths, p)
		}
	}
	for p, s := range l.stamps {
		if was, ok := earlier.stamps[p]; ok && was != s || !ok && !common {
			add(p)
		}
	}
	if !common {
		for p := range earlier.stamps {
			if _, ok := l.stamps[p]; !ok {
				add(p)
			}
		}
		differ = differ || l.more != earlier.more
	}
	slices.Sort(paths)
	return paths, differ
}
