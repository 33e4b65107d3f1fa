package compilers

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/epcached/epcached/compilers/dialogue"
)

// SandboxOptions widen what workers may reach. As it is, a worker reads the system's libraries, its runtime, its model and the devices that compute,
// writes only into its job's folder, has no network, and leaves no process behind, each as far as the kernel can keep it so.
type SandboxOptions struct {
	Network      bool     // workers may use the network: a vendor's compiler may ask a licence server
	Read         []string // absolute paths of folders and files that they may read as well
	Write        []string // folders, or device files, that they may write as well
	NoNamespaces bool     // workers get no pid namespace of their own
}

// Measure is one thing that keeps workers from doing harm.
type Measure struct {
	Name    string // "files", "network", "processes", "memory", "process limit", "privileges", "user"
	InForce bool
	Text    string // how it is done, or what is missing
	Hint    string // what to do about it; empty when in force
}

// String gives a line for people.
func (m Measure) String() string {
	if m.InForce {
		return m.Name + ": " + m.Text
	}
	return m.Name + ": NOT IN FORCE: " + m.Text
}

// Sandboxed is a Compiler that tells how its workers are kept from doing harm.
type Sandboxed interface {
	// Sandbox tries it out, once, in a worker that loads nothing of a vendor. Later calls give what the first found.
	Sandbox(ctx context.Context) ([]Measure, error)
}

// systemFiles is what programs need besides their own libraries: those of the system, what says where they are, and what tells of the machine.
// Of /etc only what vendors' loaders read. The kernel shows in /proc what it shows to anybody; of other processes' memory it shows nothing.
var systemFiles = []string{
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/gnu/store", "/run/opengl-driver", "/run/current-system/sw",
	"/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload", "/etc/alternatives", "/etc/OpenCL", "/etc/vulkan",
	"/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime", "/etc/os-release", "/proc", "/sys",
}

// deviceFiles begin the names of devices in /dev that compute, and of those that every program expects.
var deviceFiles = []string{
	"null", "zero", "full", "random", "urandom",
	"dri", "accel", "kfd", "nvidia", "dxg", "dma_heap", "udmabuf", "ion", "kgsl", "fastrpc", "adsprpc", "cdsprpc", "mali", "galcore", "apex_", "hailo", "rknpu",
}

// confinement is what the worker of a request may reach. folder is the job's.
func (o *ORT) confinement(req dialogue.Request, folder string) *dialogue.Confinement {
	s := o.opts.Sandbox
	c := &dialogue.Confinement{Network: s.Network, Write: append([]string{folder}, s.Write...), Devices: devices()}
	for _, path := range systemFiles {
		// Of a folder above the daemon's own not all may be read.
		if o.opts.Scratch == "" || !strings.HasPrefix(o.opts.Scratch, path+"/") {
			c.Read = append(c.Read, path)
		}
	}
	if s.Network {
		c.Read = append(c.Read, "/etc/resolv.conf", "/etc/hosts", "/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/run/systemd/resolve")
	}
	c.Read = append(c.Read, slices.Concat(s.Read, req.Read)...)
	model := req.Model
	if req.ModelFile != nil { // the link there means something else in this process; the worker is let to the file by its descriptor
		c.Read = append(c.Read, filepath.Dir(model))
		model = ""
	}
	for _, file := range append(slices.Clone(req.Readable), req.ORTLibrary, model) {
		c.Read = append(c.Read, foldersOf(file)...)
	}
	for _, m := range req.Share {
		c.Read = append(c.Read, foldersOf(m.Model)...)
	}
	for _, ep := range req.EPs {
		c.Read = append(c.Read, foldersOf(ep.Library)...)
	}
	if req.Do == dialogue.Try {
		c.Read = slices.DeleteFunc(c.Read, func(path string) bool { return path == filepath.Dir(req.Model) })
	}
	slices.Sort(c.Read)
	c.Read = slices.Compact(c.Read)
	return c
}

// foldersOf gives the folder that a file is in, and the one where it really is.
func foldersOf(file string) []string {
	if file == "" {
		return nil
	}
	folders := []string{filepath.Dir(file)}
	if real, err := filepath.EvalSymlinks(file); err == nil && filepath.Dir(real) != folders[0] { // else the worker says that it is not there
		folders = append(folders, filepath.Dir(real))
	}
	return folders
}

func devices() []string {
	entries, _ := os.ReadDir("/dev") // else there is nothing to allow
	var found []string
	for _, e := range entries {
		if slices.ContainsFunc(deviceFiles, func(name string) bool { return strings.HasPrefix(e.Name(), name) }) {
			found = append(found, "/dev/"+e.Name())
		}
	}
	return found
}

// readable lists the files that stand for the folders which a runtime's EPs load libraries from.
func readable(r Runtime, eps []EP) []string {
	var files []string
	for _, lib := range r.EPs {
		if slices.ContainsFunc(eps, func(ep EP) bool { return ep.Library == lib.Path }) {
			files = append(files, lib.Files...)
		}
	}
	return files
}
