package views

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// LayerDir returns the directory with a build's files in a layer. A path never has two contents,
// because the id is derived from the digests of the files.
func LayerDir(layer string, b *index.Build) string {
	return filepath.Join(layer, "views", ScopeDir(b.Scope), b.ID.String(), b.ID.String())
}

// InLayer returns the view that a layer has of a build, without reading its files, and a mark that
// changes if a file may have changed. It covers the stamps, the boot and the mount, because two
// images may have different files with equal stamps. The caller must not drop the view. It keeps no
// file open, so that the layer can be unmounted.
func InLayer(layer string, b *index.Build) (*View, string, error) {
	inner := LayerDir(layer, b)
	v := &View{scope: ScopeDir(b.Scope), name: b.ID.String(), id: b.ID.String(), graph: b.Graph,
		path: filepath.Dir(inner), inLayer: true}
	f, err := openDir(inner)
	if err != nil {
		return nil, "", err
	}
	defer f.Close()
	if v.at, err = cas.StampOf(f); err != nil {
		return nil, "", err
	}
	mount, err := mountOf(f)
	if err != nil {
		return nil, "", err
	}
	mark := fmt.Appendf(nil, "%s %d %v", cas.Boot(), mount, v.at)
	for _, one := range b.Files {
		stamp, err := cas.StampAt(int(f.Fd()), one.Name)
		if err != nil {
			return nil, "", err
		}
		mark = fmt.Appendf(mark, " %v", stamp)
	}
	sum := cas.SumBytes(mark)
	return v, string(sum[:]), nil
}

// MarkOf returns such a mark for one file, without opening it.
func MarkOf(path string) (string, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_BASIC_STATS|mountMask,
		&st); err != nil {
		return "", &os.PathError{Op: "statx", Path: path, Err: err}
	}
	return fmt.Sprint(st.Mnt_id, st.Dev_major, st.Dev_minor, st.Ino, st.Size, st.Mtime, st.Ctime),
		nil
}

const mountMask = unix.STATX_MNT_ID_UNIQUE | unix.STATX_MNT_ID

// mountOf returns the id of the mount that a file is on. Since Linux 6.8 ids are unique.
func mountOf(f *os.File) (uint64, error) {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, mountMask, &st); err != nil {
		return 0, &os.PathError{Op: "statx", Path: f.Name(), Err: err}
	}
	return st.Mnt_id, nil
}
