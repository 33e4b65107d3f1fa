package rights

import (
	"bufio"
	"bytes"
	"os"
	"os/user"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Owners finds the user behind a uid. The uids that /etc/subuid gives to a user, for containers, are that
// user's: otherwise one person could speak as sixty thousand. Uids that the daemon's user namespace does
// not map all arrive as the kernel's overflow uid, and so count as one by themselves.
type Owners struct {
	Path string // SubUIDs, or another file in tests

	mu     sync.Mutex
	at     time.Time // the file's, when it was read; guarded by mu
	ranges []uidRange
}

type uidRange struct {
	owner        uint32
	start, count uint64
}

// SubUIDs is where the system has these ranges.
const SubUIDs = "/etc/subuid"

// maxSubuid bounds what is read of the file.
const maxSubuid = 1 << 20

// Of returns the owner of a uid: the uid itself, unless it lies in the range of another user.
func (o *Owners) Of(uid uint32) uint32 {
	o.mu.Lock()
	defer o.mu.Unlock()
	info, err := os.Stat(o.Path)
	if err != nil || info.Size() > maxSubuid {
		return uid // most machines without containers have no such file
	}
	if !info.ModTime().Equal(o.at) {
		text, err := os.ReadFile(o.Path)
		if err != nil {
			return uid
		}
		o.ranges, o.at = parseSubuid(text, uidByName), info.ModTime()
	}
	for _, r := range o.ranges {
		if uint64(uid) >= r.start && uint64(uid)-r.start < r.count {
			return r.owner
		}
	}
	return uid
}

// parseSubuid reads lines of "owner:start:count"; an owner is a name or a number. Other lines are skipped.
func parseSubuid(text []byte, byName func(string) (uint32, bool)) []uidRange {
	var out []uidRange
	lines := bufio.NewScanner(bytes.NewReader(text))
	for lines.Scan() {
		parts := strings.Split(strings.TrimSpace(lines.Text()), ":")
		if len(parts) != 3 {
			continue
		}
		start, err1 := strconv.ParseUint(parts[1], 10, 32)
		count, err2 := strconv.ParseUint(parts[2], 10, 33)
		if err1 != nil || err2 != nil {
			continue
		}
		if owner, err := strconv.ParseUint(parts[0], 10, 32); err == nil {
			out = append(out, uidRange{uint32(owner), start, count})
		} else if owner, ok := byName(parts[0]); ok {
			out = append(out, uidRange{owner, start, count})
		}
	}
	return out
}

func uidByName(name string) (uint32, bool) {
	u, err := user.Lookup(name)
	if err != nil {
		return 0, false
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	return uint32(uid), err == nil
}
