package compilers

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/compilers/workerproto"
)

// Runtime is one ONNX Runtime with the EP libraries beside it. All paths are absolute.
type Runtime struct {
	Directory  string // the directory that Find was given
	ORTLibrary string // libonnxruntime.so.X.Y.Z
	ORTVersion string // from the file's name; empty if the name has none, and then Probe reports it
	EPs        []EPLibrary
}

// EPLibrary is a plugin EP library and the files that identify it.
type EPLibrary struct {
	EP   string // canonical EP name
	Path string
	// Files are the sorted absolute paths of the files whose bytes identify the library: the
	// library, the shared libraries in its directory, and those in package directories that its run
	// path reaches. Never libonnxruntime: builds do not depend on its version.
	Files []string
	// Elsewhere: a run path with $ORIGIN leads to directories that [LibrariesBeside] does not
	// cover. The libraries that an application shows then do not suffice to identify this one.
	Elsewhere bool
	// Tool is the identity of the arguments of the vendor's compiler that replaces the library; its
	// files are among Files. Empty: there is none.
	Tool string
	// Absent: the library does not exist, and Path is the tool's program.
	Absent bool
}

// Library returns the runtime's library for an EP, or an error that wraps ErrNotFound and says
// which EPs there are.
func (r Runtime) Library(ep string) (EPLibrary, error) {
	var have []string
	for _, lib := range r.EPs {
		if lib.EP == ep {
			return lib, nil
		}
		have = append(have, lib.EP)
	}
	if len(have) == 0 {
		have = []string{"none"}
	}
	return EPLibrary{}, fmt.Errorf("library for %q in runtime %q: %w (it has: %s)", ep, r.Directory,
		ErrNotFound, strings.Join(have, ", "))
}

// Complete sets the fields that can be derived from the libraries in r: the files that identify
// each EP library, and ONNX Runtime's version if the file's name contains it. It loads no library.
// It is for runtimes that are configured library by library; Find is for those in one directory.
func Complete(r Runtime) (Runtime, error) {
	if err := library("libonnxruntime", r.ORTLibrary); err != nil {
		return Runtime{}, err
	}
	full := Runtime{Directory: r.Directory, ORTLibrary: r.ORTLibrary, ORTVersion: r.ORTVersion}
	if v := versionOf(r.ORTLibrary); v != "" {
		full.ORTVersion = v
	}
	for _, l := range r.EPs {
		if err := library(l.EP, l.Path); err != nil {
			return Runtime{}, err
		}
		full.EPs = append(full.EPs, describeLibrary(l.EP, l.Path))
	}
	if len(full.EPs) == 0 {
		return Runtime{}, fmt.Errorf("runtime %q: EP library: %w: none is named", r.ORTLibrary,
			ErrNotFound)
	}
	return full, nil
}

func library(what, path string) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("library of %s: %q is not an absolute path", what, path)
	}
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("library of %s: %w", what, err)
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("library of %s: %q is not a regular file", what, path)
	}
	return nil
}

// MachineClass returns the hardware that an EP's builds depend on, for EPs that do not state it:
// for a processor "cpu:" and a digest of the instruction sets that compilers choose between,
// otherwise the type, vendor and device, such as "npu:8086:7d1d". It is "" if the EP compiles for a
// device that this machine does not have, or if the instruction sets cannot be read.
func MachineClass(ep EP, devices []DeviceFacts) string {
	if isTargetAbsent([]workerproto.EPResult{{Name: ep.Name, Devices: devices}}, []EP{ep}) {
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

// IsMachineClass reports whether hardware comes from MachineClass, and not from an EP.
func IsMachineClass(hardware string) bool { return machineClass.MatchString(hardware) }

// ProcessorClass is the MachineClass of an EP that uses the processor.
func ProcessorClass() string {
	sets := instructionSets()
	if len(sets) == 0 {
		return ""
	}
	sum := blake3.Sum256([]byte(strings.Join(slices.Concat(sets, InstructionLimits()), " ")))
	return fmt.Sprintf("cpu:%x", sum[:8])
}

// InstructionLimits returns the environment variables, as "NAME=value", that prevent oneDNN from
// using some instruction sets of the processor. Workers get them too, and they are part of the
// processor's class, because an EP then compiles for fewer instructions.
func InstructionLimits() (limits []string) {
	for _, name := range []string{"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"} {
		if value, set := os.LookupEnv(name); set {
			limits = append(limits, name+"="+value)
		}
	}
	return limits
}

// instructionSets lists the instruction sets that compilers and kernels choose between: SSE4, AVX,
// FMA, VNNI, AMX, and on Arm all features. It omits the processor's model and microcode, because
// builds do not depend on these. It is read once, because each plan needs it and it never changes.
var instructionSets = sync.OnceValue(func() []string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil
	}
	first, _, _ := bytes.Cut(text, []byte("\n\n"))
	begun := []string{"sse4_", "avx", "fma", "amx"} // prefixes of sets with several versions
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
})
