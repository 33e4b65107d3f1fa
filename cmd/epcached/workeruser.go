package main

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/config"
)

// workerUser gives the user that workers run as, nil for the daemon's own. It finds out now what would fail each compile later.
func workerUser(s *config.Settings, worker string) (*compilers.Credential, error) {
	if s.WorkerUser == "" {
		return nil, nil
	}
	wrong := func(err error) error {
		return usageError{fmt.Errorf("configuration: worker_user %q: %w", s.WorkerUser, err)}
	}
	c, err := lookUpUser(s.WorkerUser)
	if err != nil {
		return nil, wrong(err)
	}
	switch {
	case int(c.UID) == os.Geteuid():
		return nil, nil
	case os.Geteuid() != 0:
		return nil, wrong(errors.New("only a daemon that runs as root can start workers as another user"))
	case c.GID == 0:
		return nil, wrong(errors.New("root's group is no group for workers"))
	}
	paths := []string{filepath.Join(s.State, "staging"), worker}
	for _, rt := range s.Runtimes {
		paths = append(paths, rt.Directory, rt.ORTLibrary)
		for _, library := range rt.EPLibraries {
			paths = append(paths, library)
		}
	}
	for _, path := range paths {
		if err := c.CanPass(path); err != nil {
			return nil, wrong(err)
		}
	}
	if err := c.CanRun(worker); err != nil {
		return nil, wrong(err)
	}
	return c, nil
}

// lookUpUser reads "name", "uid", "name:group" or "uid:gid". A number need not be in the list of users, but then needs a group.
func lookUpUser(text string) (*compilers.Credential, error) {
	name, group, _ := strings.Cut(text, ":")
	var c compilers.Credential
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
		return nil, fmt.Errorf("group %q has the id %q", group, g.Gid)
	}
	c.GID = gid
	return &c, nil
}

// credentialOf gives a user's ids, with those of all groups that it is in.
func credentialOf(u *user.User) (compilers.Credential, error) {
	uid, ok := parseID(u.Uid)
	gid, ok2 := parseID(u.Gid)
	if !ok || !ok2 {
		return compilers.Credential{}, fmt.Errorf("user %q has the ids %q and %q", u.Username, u.Uid, u.Gid)
	}
	c := compilers.Credential{UID: uid, GID: gid}
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
