package compilers

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
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
	least := int64(info.Totalram) * int64(info.Unit)
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return least
	}
	for line := range strings.Lines(string(text)) {
		own, found := strings.CutPrefix(strings.TrimSpace(line), "0::/")
		if !found {
			continue // cgroup version 1
		}
		for dir := filepath.Join("/sys/fs/cgroup", own); strings.HasPrefix(dir,
			"/sys/fs/cgroup"); dir = filepath.Dir(dir) {
			bound, err := os.ReadFile(filepath.Join(dir, "memory.max"))
			if err != nil {
				continue // the root cgroup has none
			}
			// otherwise it is "max"
			if n, err := strconv.ParseInt(strings.TrimSpace(string(bound)), 10, 64); err == nil &&
				n > 0 {
				least = min(least, n)
			}
		}
	}
	return least
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
