package compilers

import (
	"fmt"
	"os/user"
	"strconv"
	"strings"
)

// LookUpUser reads "name", "uid", "name:group" or "uid:gid". A number need not be in the list of users, but then needs a group.
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
		return nil, fmt.Errorf("group %q has the id %q", group, g.Gid)
	}
	c.GID = gid
	return &c, nil
}

func credentialOf(u *user.User) (Credential, error) {
	uid, ok := parseID(u.Uid)
	gid, ok2 := parseID(u.Gid)
	if !ok || !ok2 {
		return Credential{}, fmt.Errorf("user %q has the ids %q and %q", u.Username, u.Uid, u.Gid)
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
