package compilers

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/compilers/dialogue"
)

// MachineClass names the hardware that an EP's builds depend on, for EPs that do not state it: for
// a processor "cpu:" and a digest of the instruction sets that compilers choose between, otherwise
// the type, vendor and device, such as "npu:8086:7d1d". It is "" where the EP compiles for a device
// that is not in this machine, and where the instruction sets cannot be read.
func MachineClass(ep EP, devices []DeviceFacts) string {
	if targetAbsent([]dialogue.EPResult{{Name: ep.Name, Devices: devices}}, []EP{ep}) {
		return ""
	}
	var parts []string
	for _, d := range devices {
		part := strings.ToLower(fmt.Sprintf("%s:%04x:%04x", d.Type, d.VendorID, d.DeviceID))
		if strings.EqualFold(d.Type, "CPU") {
			part = ProcessorClass()
		}
		if part == "" {
			return ""
		}
		if !slices.Contains(parts, part) {
			parts = append(parts, part)
		}
	}
	return strings.Join(parts, ",")
}

var machineClass = regexp.MustCompile(`^(cpu|gpu|npu):[0-9a-f:]+(,|$)`)

// IsMachineClass tells whether hardware is what MachineClass gives, and no EP states.
func IsMachineClass(hardware string) bool { return machineClass.MatchString(hardware) }

// ProcessorClass is the MachineClass of an EP that uses the processor.
func ProcessorClass() string {
	sets := instructionSets()
	if len(sets) == 0 {
		return ""
	}
	sum := blake3.Sum256([]byte(strings.Join(append(sets, InstructionLimits()...), " ")))
	return fmt.Sprintf("cpu:%x", sum[:8])
}

// InstructionLimits gives those variables of this process's environment, as "NAME=value", that keep
// oneDNN from instruction sets which the processor has. Workers get them as well, and they are part
// of the processor's class, because an EP then compiles for less.
func InstructionLimits() (limits []string) {
	for _, name := range []string{"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"} {
		if value, set := os.LookupEnv(name); set {
			limits = append(limits, name+"="+value)
		}
	}
	return limits
}

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
