package cache

import (
	"bytes"
	"os"
	"path/filepath"
	"sort"
)

// machineStamp digests what a device list and a fingerprint depend on besides the libraries: the processor, the
// accelerators on the bus, the versions of kernel modules that say theirs, and the kernel.
func machineStamp() [32]byte {
	var b bytes.Buffer
	b.Write(processor())
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
