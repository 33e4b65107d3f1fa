package watch

import (
	"crypto/sha256"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxLinks bounds the links in one path, as the kernel does.
const maxLinks = 40

// snapshot has the stamps of a subject at one moment.
type snapshot struct {
	stamps    map[string]stamp // of the paths' targets, and of the entries of directories
	unwatched string           // why part of it cannot be watched; "" if all can
}

// differs compares the stamps of the paths in both.
func (l *snapshot) differs(earlier *snapshot) bool {
	for p, s := range l.stamps {
		if was, ok := earlier.stamps[p]; ok && was != s {
			return true
		}
	}
	return false
}

// snapshot takes a snapshot. It watches each directory on the paths before it reads it, so that
// later changes are reported.
func (d *directories) snapshot(s *subject, paths []string) *snapshot {
	k := &walker{snapshot: &snapshot{stamps: make(map[string]stamp)}, directories: d, subject: s,
		needed: make(map[string]names), kinds: make(map[string]fsKind)}
	for _, p := range paths {
		k.path(p)
	}
	d.keep(s, k.needed)
	return k.snapshot
}

type walker struct {
	*snapshot
	*directories
	subject *subject
	needed  map[string]names
	kinds   map[string]fsKind // of directories
}

func (k *walker) path(path string) {
	at, ends := k.walk(path)
	k.stamps[path] = stampOf(path, k.kindOf(filepath.Dir(at)))
	if !ends {
		return
	}
	k.need(at, "")
	entries, _ := os.ReadDir(at) // the stamp has the error
	for _, e := range entries {
		p := filepath.Join(at, e.Name())
		if e.Type()&os.ModeSymlink != 0 {
			k.walk(p)
		}
		k.stamps[p] = stampOf(p, k.kindOf(at))
	}
}

// walk resolves a path one name at a time, as the kernel does, and watches each directory. It
// returns the resolved path, and whether it is a directory.
func (k *walker) walk(path string) (at string, isDir bool) {
	at = "/"
	rest := strings.Split(path, "/")
	for links := 0; len(rest) > 0; {
		name := rest[0]
		rest = rest[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at)
			continue
		}
		k.need(at, name)
		p := filepath.Join(at, name)
		info, err := os.Lstat(p)
		switch {
		case err != nil:
			return p, false // missing; the watch notices when it appears
		case info.IsDir():
			at = p
		case info.Mode()&os.ModeSymlink != 0 && links < maxLinks:
			links++
			target, _ := os.Readlink(p) // "" if it was just removed
			if strings.HasPrefix(target, "/") {
				at = "/"
			}
			rest = append(strings.Split(target, "/"), rest...)
		default:
			return p, false
		}
	}
	return at, true
}

// need records that a snapshot needs a name in a directory.
func (k *walker) need(path, name string) {
	if k.needed[path] == nil {
		k.needed[path] = make(names)
	}
	if k.needed[path][name] {
		return
	}
	k.needed[path][name] = true
	why := k.kindOf(path).noEvents
	if why != "" {
		why = path + ": " + why
	} else if err := k.watch(k.subject, path, name); err != nil {
		why = err.Error()
	}
	if k.unwatched == "" {
		k.unwatched = why
	}
}

func (k *walker) kindOf(path string) fsKind {
	kind, ok := k.kinds[path]
	if !ok {
		kind = kindOf(path)
		k.kinds[path] = kind
	}
	return kind
}

// stamp is compared to find changes that no event reported.
type stamp struct {
	dev, ino     uint64
	mode         uint32
	size         int64
	mtime, ctime int64
	// text is the digest of the content if times are useless, or the error.
	text string
}

func stampOf(path string, kind fsKind) stamp {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		return stamp{text: err.Error()}
	}
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFDIR: // only the mode, because its entries have their own stamps
		return stamp{dev: st.Dev, ino: st.Ino, mode: st.Mode}
	case syscall.S_IFREG:
		if kind.noTimes {
			// Inode numbers and times are generated on access, and change after a lack of memory.
			return stamp{mode: st.Mode, text: contentOf(path)}
		}
	}
	return stamp{st.Dev, st.Ino, st.Mode, st.Size, st.Mtim.Nano(), st.Ctim.Nano(), ""}
}

// smallFile is how much of a file in /sys or /proc is compared, in bytes.
const smallFile = 4096

func contentOf(path string) string {
	// some files in /proc would block
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, smallFile))
	if err != nil {
		return err.Error()
	}
	sum := sha256.Sum256(b)
	return string(sum[:])
}

// fsKind has the relevant properties of a file system.
type fsKind struct {
	noEvents string // why it reports no changes; "" if it does
	noTimes  bool   // compare contents, because its times are useless
}

// kindOf returns the properties of a directory's file system. It ignores errors, because a missing
// directory is noticed otherwise.
func kindOf(path string) fsKind {
	var st unix.Statfs_t
	if unix.Statfs(path, &st) != nil {
		return fsKind{}
	}
	magic := uint32(st.Type) // the type differs between architectures
	if name, ok := shared[magic]; ok {
		return fsKind{noEvents: name + " does not report changes by other machines or its server"}
	}
	if name, ok := virtual[magic]; ok {
		return fsKind{noEvents: name + " does not report changes", noTimes: true}
	}
	return fsKind{}
}

// shared are file systems that other machines change without events here. FUSE stands for virtiofs
// as well.
var shared = map[uint32]string{
	0x6969: "NFS", 0x517b: "SMB", 0xff534d42: "CIFS", 0xfe534d42: "SMB", 0x65735546: "FUSE",
	0x01021997: "9P", 0x00c36400: "Ceph", 0x5346414f: "AFS", 0x6b414653: "AFS", 0x73757245: "Coda",
	0x0bd00bd0: "Lustre", 0x47504653: "GPFS", 0x01161970: "GFS2", 0x7461636f: "OCFS2",
	0x20030528: "OrangeFS", 0x19830326: "BeeGFS", 0x786f4256: "vboxsf", 0xbacbacbc: "vmhgfs",
}

// virtual are file systems that generate files when they are read.
var virtual = map[uint32]string{
	0x62656572: "sysfs", 0x9fa0: "proc", 0x64626720: "debugfs", 0x62656570: "configfs",
	0x73636673: "securityfs", 0x63677270: "cgroup",
}
