package cache

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Somebody may remove the state folder under a running daemon, all of it or what is in it, or put another in its place. Files that are open
// stay, but nothing that has a name does: what is compiled is served and not kept, and another daemon may begin on the same path. Nothing is mended in
// place: whoever opened the cache closes it and opens it anew, which makes what is missing and rebuilds the index from the manifests there are.

// lasting are the folders that a running cache never makes. Others, such as those of views, are made anew whenever they are needed.
var lasting = []string{"objects", filepath.Join("objects", "incoming"), "manifests", "recipes", filepath.Join("recipes", "incoming")}

// Uprooted tells once what of the state folder is gone, or is not this cache's any more, within seconds. Until it is closed the cache answers, and keeps nothing.
func (c *Cache) Uprooted() <-chan string { return c.uprooted }

// lookAround looks whether the state folder is still the one that was opened.
func (c *Cache) lookAround() {
	why := c.missingGround()
	if why == "" {
		c.lookForJournal()
		return
	}
	select {
	case c.uprooted <- why:
		c.log.Error("the state folder was removed, or a part of it", "state", c.dir, "what", why)
	default: // told, or about to be
	}
}

// lookForJournal has the journal written anew if it alone was deleted: all of it is in memory as well.
func (c *Cache) lookForJournal() {
	restored, err := c.index.Journal.Restore()
	if err != nil {
		c.log.Error("the journal was deleted, and cannot be written anew", "error", err)
	} else if restored {
		c.log.Warn("the journal was deleted while the daemon ran; it is written anew", "path", c.path("journal"))
	}
}

// missingGround says what is not as it was opened; "": nothing. What cannot be looked at is not missing.
func (c *Cache) missingGround() string {
	if _, err := os.Stat(c.dir); errors.Is(err, fs.ErrNotExist) {
		return "the folder is not there any more"
	}
	for _, name := range lasting {
		if _, err := os.Stat(c.path(name)); errors.Is(err, fs.ErrNotExist) {
			return fmt.Sprintf("%s is not there any more", name)
		}
	}
	now, err := os.Stat(c.path("lock"))
	if errors.Is(err, fs.ErrNotExist) {
		return "lock is not there any more"
	}
	ours, failed := c.lock.Stat()
	if err == nil && failed == nil && !os.SameFile(now, ours) {
		return "another folder is in its place, or another process has it"
	}
	return ""
}

// adviseUprooted tells of a state folder that is not there, or was made anew.
func (c *Cache) adviseUprooted() []Advice {
	c.lookAround() // who asks need not wait for the next look
	if why := c.missingGround(); why != "" {
		return []Advice{problem("state", "%s: %s; nothing that is compiled now is kept", c.dir, why).
			hint("the daemon makes it anew within seconds, and tells in its log why it cannot")}
	}
	if c.options.Remade == "" {
		return nil
	}
	return []Advice{warning("state", "%s was made anew while the daemon ran: %s; what is gone is compiled once more", c.dir, c.options.Remade).
		hint("whoever cleans up there should leave it out, or stop the daemon before; epcachectl rm --all empties it")}
}
