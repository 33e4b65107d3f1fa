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
	var sets []string
	for line := range strings.Lines(string(first)) {
		key, flags, _ := strings.Cut(line, ":")
		all := strings.TrimSpace(key) == "Features" // Arm's
		if !all && strings.TrimSpace(key) != "flags" {
			continue
		}
		for _, flag := range strings.Fields(flags) {
			if all || chosenBetween(flag) {
				sets = append(sets, flag)
			}
		}
	}
	slices.Sort(sets)
	return slices.Compact(sets)
}

func chosenBetween(flag string) bool {
	for _, set := range []string{"sse4_", "avx", "fma", "amx"} {
		if strings.HasPrefix(flag, set) {
			return true
		}
	}
	return strings.Contains(flag, "vnni")
}
