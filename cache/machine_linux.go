package cache

import (
	"bytes"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers"
)

// machineStamp digests what a device list and a fingerprint depend on besides the libraries: the
// processor with the limits of its instruction sets, the accelerators on the bus, the versions of
// kernel modules that say theirs, and the kernel.
func machineStamp() [32]byte {
	var b bytes.Buffer
	b.Write(processor())
	b.WriteString(strings.Join(compilers.InstructionLimits(), "\n"))
	add := func(pattern string) {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return // only for a malformed pattern
		}
		sort.Strings(paths)
		for _, p := range paths {
			text, err := os.ReadFile(p)
			if err != nil {
				continue // a device that went away meanwhile
			}
			b.WriteString(p)
			b.Write(text)
		}
	}
	add("/sys/bus/pci/devices/*/modalias")
	add("/sys/class/accel/*/device/modalias")
	add("/sys/module/*/version")
	add("/proc/sys/kernel/osrelease")
	return digestOf(b.Bytes())
}

// processor gives the lines that name the first processor and what it can do: no frequencies, they change.
func processor() []byte {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil // without /proc the probe's own result has to do
	}
	first, _, _ := bytes.Cut(text, []byte("\n\n"))
	var out []byte
	for _, line := range bytes.Split(first, []byte("\n")) {
		key, _, _ := bytes.Cut(line, []byte(":"))
		switch string(bytes.TrimSpace(key)) {
		case "vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part":
			out = append(append(out, line...), '\n')
		}
	}
	return out
}

// machineMemory is how many bytes of memory this process may have the use of: the machine's, or what its cgroups leave of that.
// 0: it cannot be told.
func machineMemory() int64 {
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
