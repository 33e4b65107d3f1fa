package jobs

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// MachineMemory returns how many bytes of memory this process may use: the machine's, or what its
// cgroups leave of that. 0: it cannot be told.
func MachineMemory() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0 // it fails for no reason that there is here
	}
	least := int64(info.Totalram) * int64(info.Unit)
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return least
	}
	for line := range strings.Lines(string(text)) {
		own, found := strings.CutPrefix(strings.TrimSpace(line), "0::/")
		if !found {
			continue // version 1
		}
		for dir := filepath.Join("/sys/fs/cgroup", own); strings.HasPrefix(dir, "/sys/fs/cgroup"); dir = filepath.Dir(dir) {
			bound, err := os.ReadFile(filepath.Join(dir, "memory.max"))
			if err != nil {
				continue // the root has none
			}
			if n, err := strconv.ParseInt(strings.TrimSpace(string(bound)), 10, 64); err == nil && n > 0 { // else it is "max"
				least = min(least, n)
			}
		}
	}
	return least
}
