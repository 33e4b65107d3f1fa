package compilers

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/epcached/epcached/compilers/workerproto"
)

// modelDir is the subdirectory of a job's directory for a model whose own path the workers' user
// cannot access.
const modelDir = "given"

// grantModelAccess lets the workers' user access the files of a request: it opens directories below
// Scratch, and files beside a model there, to the user's group. It links or copies a model
// elsewhere, as in the store, into the job's directory. It returns the request for the worker, and
// a function that undoes the access.
func (o *ORT) grantModelAccess(req workerproto.Request, dir string) (workerproto.Request,
	func(), error) {
	if o.opts.User == nil {
		return req, func() {}, nil
	}
	if err := o.openDirs(dir); err != nil {
		return req, nil, err
	}
	model := filepath.Dir(req.Model)
	switch {
	case req.Model == "" || model == dir:
		return req, func() {}, nil // the user owns the directory and its files already
	case o.inScratch(model):
		undo, err := o.openModels(req)
		return req, undo, err
	}
	given := filepath.Join(dir, modelDir)
	if err := linkTree(model, given); err != nil {
		return req, nil, fmt.Errorf("model for the worker: %w", err)
	}
	req.Model = filepath.Join(given, filepath.Base(req.Model))
	if source, has := req.Options.SessionOptions[sourceOption]; has {
		req.Options.SessionOptions = maps.Clone(req.Options.SessionOptions)
		// it is beside it, too
		req.Options.SessionOptions[sourceOption] = filepath.Join(given, filepath.Base(source))
	}
	req.Share = slices.Clone(req.Share)
	for i, m := range req.Share { // they are beside it
		req.Share[i].Model = filepath.Join(given, filepath.Base(m.Model))
	}
	return req, func() {}, nil
}

// openModels lets the workers' group access a request's models in Scratch until undo is called. The
// models of a group may be in several directories.
func (o *ORT) openModels(req workerproto.Request) (undo func(), err error) {
	var shared []string
	undo = func() {
		for _, path := range slices.Backward(shared) {
			if info, err := os.Lstat(path); err == nil { // else it was removed meanwhile
				// other users cannot access it, because the daemon's directory does not admit them
				_ = os.Lchown(path, -1, os.Getegid())
				_ = os.Chmod(path, info.Mode().Perm()&^0o050)
			}
		}
	}
	dirs := []string{filepath.Dir(req.Model)}
	for _, m := range req.Share {
		if dir := filepath.Dir(m.Model); o.inScratch(dir) && !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	for _, dir := range dirs {
		if err = o.openDirs(dir); err == nil {
			err = o.openFiles(dir, &shared)
		}
		if err != nil {
			undo()
			return nil, err
		}
	}
	return undo, nil
}

func (o *ORT) inScratch(path string) bool {
	return o.opts.Scratch != "" && strings.HasPrefix(path+"/", o.opts.Scratch+"/")
}

// openDirs lets the group enter, but not list, directories below Scratch.
func (o *ORT) openDirs(dir string) error {
	for ; o.inScratch(dir); dir = filepath.Dir(dir) {
		if err := o.share(dir, 0o010); err != nil {
			return err
		}
	}
	return nil
}

// share changes a file to the workers' group, with these permissions for it.
func (o *ORT) share(path string, rights fs.FileMode) error {
	info, err := os.Lstat(path)
	if err != nil {
		return fmt.Errorf("access of workers: %w", err)
	}
	owner := statOf(info)
	if owner.Uid == o.opts.User.UID || owner.Gid == o.opts.User.GID &&
		info.Mode()&rights == rights {
		return nil
	}
	if err := os.Lchown(path, -1, int(o.opts.User.GID)); err != nil {
		return fmt.Errorf("access of workers: %w", err)
	}
	if err := os.Chmod(path, info.Mode().Perm()|rights); err != nil {
		return fmt.Errorf("access of workers: %w", err)
	}
	return nil
}

func (o *ORT) openFiles(dir string, shared *[]string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return fmt.Errorf("access of workers: %w", err)
		}
		info, err := entry.Info()
		rights := fs.FileMode(0o040)
		switch {
		case err != nil || path == dir:
			return nil // removed in the meantime, or shared already
		case info.IsDir() && info.Mode()&0o001 == 0:
			rights = 0o010
		case !info.Mode().IsRegular() || info.Mode()&0o004 != 0:
			return nil
		}
		if err := o.share(path, rights); err != nil {
			return err
		}
		*shared = append(*shared, path)
		return nil
	})
}

// linkTree makes a directory with the regular files of another: links if possible and if all may
// read the files, otherwise copies.
func linkTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, relative)
		if entry.IsDir() {
			if err := os.Mkdir(target, 0o755); err != nil {
				return err
			}
			return os.Chmod(target, 0o755) // explicitly, because of the umask
		}
		info, err := entry.Info()
		if err != nil || !info.Mode().IsRegular() {
			return err
		}
		if info.Mode()&0o004 != 0 && info.Mode()&0o022 == 0 && os.Link(path, target) == nil {
			return nil
		}
		return copyForAll(path, target)
	})
}

func copyForAll(from, to string) error {
	in, err := openPlain(from)
	if err != nil {
		return err
	}
	defer in.Close() // opened for reading, so no data can be lost
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Chmod(0o444), out.Close())
}

// AcceptsOpenModel implements OpenModelCompiler. A worker opens the file again, by its descriptor,
// so its user must be allowed to. It is false if files beside the model are looked up, or go into
// the artefact.
func (o *ORT) AcceptsOpenModel(job Job) bool {
	if _, isTool, err := o.toolFor(job.EPs); isTool || err != nil {
		return false // a vendor's tool may use the model's path in any way
	}
	if job.ModelFile == nil || len(job.Share) > 0 || job.Initializers.InSource ||
		IsWeightless(job.SessionOptions) {
		return false
	}
	if _, err := os.Stat("/proc/self/fd"); err != nil {
		return false
	}
	if o.opts.User == nil {
		return true
	}
	info, err := job.ModelFile.Stat()
	if err != nil || !o.inScratch(filepath.Dir(job.Model)) {
		return false
	}
	uid := statOf(info).Uid
	return uid == o.opts.User.UID && info.Mode()&0o400 != 0 || uid != o.opts.User.UID &&
		info.Mode()&0o004 != 0
}

// CanPass fails with the first directory above a path that the user cannot enter, by the
// directories' modes only. It ignores missing directories and the path "".
func (c *Credential) CanPass(path string) error {
	if path == "" {
		return nil
	}
	for _, dir := range parents(path) {
		info, err := os.Stat(dir)
		if err != nil {
			return nil // opening it reports that it is missing
		}
		if !c.may(info, 1) {
			return fmt.Errorf("uid %d cannot pass %q, which is above %q: chmod o+x %s", c.UID,
				dir, path, dir)
		}
	}
	return nil
}

// CanRun reports whether the user may execute a file.
func (c *Credential) CanRun(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !c.may(info, 1) {
		return fmt.Errorf("uid %d cannot run %q: chmod o+x %s", c.UID, path, path)
	}
	return nil
}

// may checks the mode's bits for the user: 4 to read, 2 to write, 1 to execute or to enter.
func (c *Credential) may(info os.FileInfo, bit fs.FileMode) bool {
	owner := statOf(info)
	switch {
	case owner.Uid == c.UID:
		bit <<= 6
	case owner.Gid == c.GID || slices.Contains(c.Groups, owner.Gid):
		bit <<= 3
	}
	return info.Mode()&bit != 0
}

func parents(path string) []string {
	var dirs []string
	for dir := filepath.Dir(filepath.Clean(path)); ; dir = filepath.Dir(dir) {
		dirs = append(dirs, dir)
		if dir == filepath.Dir(dir) {
			slices.Reverse(dirs)
			return dirs
		}
	}
}

// LookUpUser reads "name", "uid", "name:group" or "uid:gid". A uid need not exist in the user
// database, but then needs a gid.
func LookUpUser(text string) (*Credential, error) {
	name, group, _ := strings.Cut(text, ":")
	var c Credential
	found, err := user.Lookup(name)
	uid, numeric := parseID(name)
	if err != nil && numeric {
		found, err = user.LookupId(name)
	}
	switch {
	case err == nil:
		if c, err = credentialOf(found); err != nil {
			return nil, err
		}
	case numeric && group != "":
		c.UID = uid
	case numeric:
		return nil, fmt.Errorf("there is no user with this id: give a group as well, %s:GID", name)
	default:
		return nil, err
	}
	if group == "" {
		return &c, nil
	}
	if gid, ok := parseID(group); ok {
		c.GID = gid
		return &c, nil
	}
	g, err := user.LookupGroup(group)
	if err != nil {
		return nil, err
	}
	gid, ok := parseID(g.Gid)
	if !ok {
		return nil, fmt.Errorf("group %q has the unexpected id %q", group, g.Gid)
	}
	c.GID = gid
	return &c, nil
}

func credentialOf(u *user.User) (Credential, error) {
	uid, ok := parseID(u.Uid)
	gid, ok2 := parseID(u.Gid)
	if !ok || !ok2 {
		return Credential{}, fmt.Errorf("user %q has the unexpected ids %q and "+
			"%q", u.Username, u.Uid, u.Gid)
	}
	c := Credential{UID: uid, GID: gid}
	groups, err := u.GroupIds()
	if err != nil {
		return c, fmt.Errorf("groups of user %q: %w", u.Username, err)
	}
	for _, g := range groups {
		if id, ok := parseID(g); ok && id != gid {
			c.Groups = append(c.Groups, id)
		}
	}
	return c, nil
}

func parseID(text string) (uint32, bool) {
	n, err := strconv.ParseUint(text, 10, 32)
	return uint32(n), err == nil
}
