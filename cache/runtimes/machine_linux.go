package runtimes

import (
	"bytes"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/compilers"
)

// readMachine digests what a device list and a fingerprint depend on besides the libraries: the
// processor with the limits of its instruction sets, the accelerators on the bus, the versions of
// kernel modules that say theirs, and the kernel.
func readMachine() [32]byte {
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
	return blake3.Sum256(b.Bytes())
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

// ProcessorVendor returns "GenuineIntel", "AuthenticAMD", or "" where the processor does not say.
func ProcessorVendor() string {
	for _, line := range bytes.Split(processor(), []byte("\n")) {
		if key, value, ok := strings.Cut(string(line), ":"); ok && strings.TrimSpace(key) == "vendor_id" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
