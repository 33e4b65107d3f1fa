package compilers

import (
	"bytes"
	"os"
	"slices"
	"strings"
)

// instructionSets lists what the processor's compilers and kernels choose between: SSE4, AVX, FMA,
// VNNI, AMX, and on Arm all features. Neither model nor microcode is among it, because builds do
// not depend on these.
func instructionSets() []string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil
	}
	first, _, _ := bytes.Cut(text, []byte("\n\n"))
	begun := []string{"sse4_", "avx", "fma", "amx"} // of sets in several steps
	var sets []string
	for line := range strings.Lines(string(first)) {
		key, flags, _ := strings.Cut(line, ":")
		all := strings.TrimSpace(key) == "Features" // Arm's
		if !all && strings.TrimSpace(key) != "flags" {
			continue
		}
		for _, flag := range strings.Fields(flags) {
			begins := func(set string) bool { return strings.HasPrefix(flag, set) }
			if all || slices.ContainsFunc(begun, begins) || strings.Contains(flag, "vnni") {
				sets = append(sets, flag)
			}
		}
	}
	slices.Sort(sets)
	return slices.Compact(sets)
}
