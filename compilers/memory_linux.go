package compilers

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/internal/bytesize"
)

// MachineMemory returns how many bytes of memory this process may use: the machine's, or less if
// its cgroups bound it. It returns 0 if unknown.
func MachineMemory() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0 // cannot fail
	}
	return ownCgroups.limit(int64(info.Totalram) * int64(info.Unit))
}

// MemoryKills returns how many processes of this process's cgroup the kernel has killed because
// memory was short, there or on the machine. It returns 0 if unknown.
func MemoryKills() int64 { return ownCgroups.kills() }

var ownCgroups = cgroups{"/proc/self/cgroup", "/sys/fs/cgroup"}

// cgroups finds the memory cgroups of a process, of version 1 or 2.
type cgroups struct{ list, root string }

// directories returns the directories of the cgroups, the innermost first. In a container the list
// may have paths of the host, of which only the outermost exists.
func (g cgroups) directories() (dirs []string) {
	text, _ := os.ReadFile(g.list) // without /proc there are none
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) < 3 {
			continue
		}
		top := g.root // of version 2, which names no controllers
		if parts[1] != "" {
			top = filepath.Join(g.root, "memory")
			if !slices.Contains(strings.Split(parts[1], ","), "memory") {
				continue
			}
		}
		for dir := filepath.Join(top, parts[2]); ; dir = filepath.Dir(dir) {
			if !strings.HasPrefix(dir, top+"/") { // the last one, also for a path with ".."
				dirs = append(dirs, top)
				break
			}
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// limit returns the least limit of the cgroups, or least if they have none that is lower.
func (g cgroups) limit(least int64) int64 {
	for _, dir := range g.directories() {
		for _, name := range []string{"memory.max", "memory.limit_in_bytes"} {
			text, _ := os.ReadFile(filepath.Join(dir, name)) // the root cgroup has none
			n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
			if err == nil && n > 0 { // otherwise it is "max"
				least = min(least, n)
			}
		}
	}
	return least
}

var killCount = regexp.MustCompile(`(?m)^oom_kill (\d+)$`)

func (g cgroups) kills() int64 {
	for _, dir := range g.directories() {
		for _, name := range []string{"memory.events", "memory.oom_control"} {
			text, _ := os.ReadFile(filepath.Join(dir, name))
			if found := killCount.FindSubmatch(text); found != nil {
				n, _ := strconv.ParseInt(string(found[1]), 10, 64) // digits
				return n
			}
		}
	}
	return 0
}

// watchMemory cancels a job if its worker and the processes that it started together take too much
// memory. The kernel's limits cover only the private memory of each process, not mapped or shared
// memory.
func watchMemory(ctx context.Context, pid int, limit int64, cancel context.CancelCauseFunc) {
	ticker := time.NewTicker(500 * time.Millisecond)
	defer ticker.Stop()
	for limit > 0 {
		if used := memoryOf(strconv.Itoa(pid)); used > limit {
			cancel(fmt.Errorf("%w: %s, more than %s", ErrMemory, bytesize.Text(used),
				bytesize.Text(limit)))
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// memoryOf sums the memory of a process and of its descendants, without mapped files. It does not
// count processes that end in the meantime, or that the system hides because they belong to other
// users.
func memoryOf(pid string) (bytes int64) {
	status, _ := os.ReadFile("/proc/" + pid + "/status")
	for line := range strings.Lines(string(status)) {
		var kilobytes int64
		if name, value, _ := strings.Cut(line, ":"); name == "RssAnon" || name == "RssShmem" {
			_, _ = fmt.Sscan(value, &kilobytes) // the kernel wrote it
			bytes += kilobytes << 10
		}
	}
	lists, _ := filepath.Glob("/proc/" + pid + "/task/*/children") // the pattern is valid
	for _, list := range lists {
		children, _ := os.ReadFile(list)
		for _, child := range strings.Fields(string(children)) {
			bytes += memoryOf(child)
		}
	}
	return bytes
}
