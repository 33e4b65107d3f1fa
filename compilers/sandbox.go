package compilers

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/epcached/epcached/compilers/workerproto"
	"github.com/epcached/epcached/internal/bytesize"
)

// SandboxOptions give workers more access. By default, a worker reads the system's libraries, its
// runtime, its model and the devices that compute, writes only into its job's directory, has no
// network, and leaves no process behind, each as far as the kernel can enforce it.
type SandboxOptions struct {
	// Network lets workers use the network, because a vendor's compiler may need a licence server.
	Network      bool
	Read         []string // absolute paths of directories and files that they may read as well
	Write        []string // directories, or device files, that they may write as well
	NoNamespaces bool     // workers get no pid namespace of their own
}

// Safeguard is one restriction of workers.
type Safeguard struct {
	// "files", "network", "processes", "memory", "process limit", "privileges", "user"
	Name    string
	InForce bool
	Text    string // how it is enforced, or what is missing
	Hint    string // the remedy; empty if in force
}

// String returns a line for messages.
func (m Safeguard) String() string {
	if m.InForce {
		return m.Name + ": " + m.Text
	}
	return m.Name + ": NOT IN EFFECT: " + m.Text
}

// SandboxReporter is a Compiler that reports the safeguards of its workers.
type SandboxReporter interface {
	// Sandbox tests the safeguards once, in a worker that loads no vendor library. Later calls
	// return the same result.
	Sandbox(ctx context.Context) ([]Safeguard, error)
}

// systemFiles are the system's files that programs need besides their own libraries; of /etc, those
// that vendors' loaders read. /proc has its public files, but no memory of other processes.
var systemFiles = []string{
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/gnu/store",
	"/run/opengl-driver", "/run/current-system/sw", "/etc/ld.so.cache", "/etc/ld.so.conf",
	"/etc/ld.so.conf.d", "/etc/ld.so.preload", "/etc/alternatives", "/etc/OpenCL", "/etc/vulkan",
	"/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime", "/etc/os-release", "/proc",
	"/sys",
}

func (o *ORT) confinement(req workerproto.Request, dir string) *workerproto.Confinement {
	s := o.opts.Sandbox
	c := &workerproto.Confinement{Network: s.Network, Reads: req.Do != workerproto.Compile &&
		req.Do != workerproto.Command, Write: append([]string{dir}, s.Write...)}
	for _, path := range systemFiles {
		// A directory above the daemon's own must not be readable as a whole.
		if o.opts.Scratch == "" || !strings.HasPrefix(o.opts.Scratch, path+"/") {
			c.Read = append(c.Read, path)
		}
	}
	if s.Network {
		c.Read = append(c.Read, "/etc/resolv.conf", "/etc/hosts", "/etc/ssl", "/etc/pki",
			"/etc/ca-certificates", "/run/systemd/resolve")
	}
	c.Read = append(c.Read, slices.Concat(s.Read, req.Read)...)
	_, unknown := o.unknown.Load(librariesOf(req.EPs))
	c.Known = !s.Network && !req.AnyCall && !unknown && req.Do != workerproto.Command &&
		!slices.ContainsFunc(req.EPs, func(ep EP) bool {
			info, _ := EPByName(ep.Name)
			return !info.KnownCalls
		})
	model := req.Model
	// The link is different in this process; the worker gets access to the file by its descriptor.
	if req.ModelFile != nil {
		c.Read = append(c.Read, filepath.Dir(model))
		model = ""
	}
	for _, file := range append(slices.Clone(req.Readable), req.ORTLibrary, model) {
		c.Read = append(c.Read, dirsOf(file)...)
	}
	for _, m := range req.Share {
		c.Read = append(c.Read, dirsOf(m.Model)...)
	}
	for _, ep := range req.EPs {
		c.Read = append(c.Read, dirsOf(ep.Library)...)
	}
	if req.Do == workerproto.TrySandbox {
		c.Read = slices.DeleteFunc(c.Read, func(path string) bool {
			return path == filepath.Dir(req.Model)
		})
	}
	slices.Sort(c.Read)
	c.Read = slices.Compact(c.Read)
	return c
}

func dirsOf(file string) []string {
	if file == "" {
		return nil
	}
	dirs := []string{filepath.Dir(file)}
	// on an error, the worker reports that it is missing
	if real, err := filepath.EvalSymlinks(file); err == nil && filepath.Dir(real) != dirs[0] {
		dirs = append(dirs, filepath.Dir(real))
	}
	return dirs
}

func readable(r Runtime, eps []EP) []string {
	var files []string
	for _, lib := range r.EPs {
		if slices.ContainsFunc(eps, func(ep EP) bool { return ep.Library == lib.Path }) {
			files = append(files, lib.Files...)
		}
	}
	return files
}

// sandboxTimeout bounds the worker that tests the safeguards. Concurrent callers wait as long.
const sandboxTimeout = 10 * time.Second

type sandboxResult struct {
	mu         sync.Mutex // guards measures
	safeguards []Safeguard
}

// Sandbox implements SandboxReporter.
func (o *ORT) Sandbox(ctx context.Context) ([]Safeguard, error) {
	o.sandboxResult.mu.Lock()
	defer o.sandboxResult.mu.Unlock()
	if o.sandboxResult.safeguards != nil {
		return o.sandboxResult.safeguards, nil
	}
	ctx, cancel := context.WithTimeout(ctx, sandboxTimeout)
	defer cancel()
	found, err := o.probeSandbox(ctx)
	if err != nil {
		return nil, fmt.Errorf("sandbox: %w", err)
	}
	o.sandboxResult.safeguards = o.safeguards(found)
	return o.sandboxResult.safeguards, nil
}

// probeSandbox has a worker try to read and write in another directory that its user may access.
func (o *ORT) probeSandbox(ctx context.Context) (workerproto.Confined, error) {
	outside, err := o.scratch()
	if err != nil {
		return workerproto.Confined{}, err
	}
	defer o.removeScratch(outside)
	bait := filepath.Join(outside, "bait")
	if err := os.WriteFile(bait, []byte("bait"), 0o600); err != nil {
		return workerproto.Confined{}, err
	}
	if err := o.chown(outside, []string{"bait"}, o.opts.User); err != nil {
		return workerproto.Confined{}, err
	}
	done, err := o.scratchJob(ctx, workerproto.Request{Do: workerproto.TrySandbox, Model: bait,
		Output: filepath.Join(outside, "made")}, Pace{}, nil)
	if err != nil {
		return workerproto.Confined{}, err
	}
	if done.Confined == nil {
		return workerproto.Confined{}, fmt.Errorf("%w: the worker did not report its "+
			"attempts", workerproto.ErrMalformed)
	}
	return *done.Confined, nil
}

func (o *ORT) safeguards(found workerproto.Confined) []Safeguard {
	way := o.host.current()
	return []Safeguard{
		files(found), o.network(found), processes(way, o.opts.Socket != ""), o.memory(found),
		o.count(way), privileges(found), o.user(found),
	}
}

func files(found workerproto.Confined) Safeguard {
	m := Safeguard{Name: "files", InForce: !found.Reads && !found.Writes}
	switch {
	case m.InForce:
		m.Text = fmt.Sprintf("workers write only to their job's directory, and cannot read the "+
			"store (Landlock ABI %d)", found.Landlock)
	case found.Landlock == 0:
		m.Text, m.Hint = "this kernel has no Landlock: workers have all rights of their user on "+
			"files", "use a kernel since 5.13 with landlock in lsm=; for a daemon that runs as "+
			"root, set worker_user"
	default:
		m.Text, m.Hint = "a worker could open a file outside its directory", "see [sandbox] in "+
			"the configuration"
	}
	return m
}

func (o *ORT) network(found workerproto.Confined) Safeguard {
	m := Safeguard{Name: "network", InForce: !found.Connects}
	switch {
	case m.InForce && found.Landlock >= 4:
		m.Text = "workers cannot open sockets (seccomp, and Landlock for TCP)"
	case m.InForce:
		m.Text = "workers cannot open sockets (seccomp)"
	case o.opts.Sandbox.Network:
		m.Text, m.Hint = "the configuration lets workers use the network", "set network = false "+
			"in [sandbox], unless a vendor's compiler needs it"
	default:
		m.Text, m.Hint = "this kernel filters no system calls: workers may use the "+
			"network", "use a kernel with CONFIG_SECCOMP_FILTER"
	}
	return m
}

func processes(iso isolation, unit bool) Safeguard {
	m := Safeguard{Name: "processes", InForce: true}
	switch {
	case iso.namespace && iso.user:
		m.Text = "child processes end with their worker (pid namespace, in a user namespace)"
	case iso.namespace:
		m.Text = "child processes end with their worker (pid namespace)"
	case unit:
		m.Text = "child processes end with their worker (its systemd unit)"
	default:
		m.InForce = false
		m.Text = "a worker's child processes are killed by its parent, but survive if the " +
			"parent itself is killed"
		m.Hint = "allow the daemon pid namespaces (root or user namespaces), or use the shipped " +
			"systemd units"
	}
	return m
}

func (o *ORT) memory(found workerproto.Confined) Safeguard {
	m := Safeguard{Name: "memory", InForce: true, Text: bytesize.Text(o.opts.Limits.Memory) +
		" for all processes of a worker, checked twice a second, and for each process"}
	switch {
	case o.opts.Socket == "":
	case found.Memory > 0:
		m.Text = bytesize.Text(found.Memory) +
			" for all processes of a worker (MemoryMax= of its systemd unit)"
	default:
		m.InForce, m.Text = false, bytesize.Text(o.opts.Limits.Memory)+" for the private memory "+
			"of each process, and no limit for shared memory"
		m.Hint = "set MemoryMax= in the workers' unit, on a system with cgroups v2 and the " +
			"memory controller"
	}
	return m
}

func (o *ORT) count(iso isolation) Safeguard {
	if o.countsProcesses(iso) {
		return Safeguard{Name: "process limit", InForce: true,
			Text: fmt.Sprintf("%d (of the workers' user)", o.opts.Limits.Processes)}
	}
	return Safeguard{Name: "process limit", Text: "the kernel counts processes by user, and the " +
		"workers have no user of their own", Hint: "use the shipped systemd units, or set " +
		"worker_user"}
}

func privileges(found workerproto.Confined) Safeguard {
	if found.Privileged || !found.Seccomp {
		return Safeguard{Name: "privileges", Text: "workers have privileges or system calls " +
			"that they do not need",
			Hint: "run the daemon as a user of its own, on a kernel that filters system calls"}
	}
	return Safeguard{Name: "privileges", InForce: true, Text: "none beyond files; system calls " +
		"that affect other processes are refused (seccomp)"}
}

func (o *ORT) user(found workerproto.Confined) Safeguard {
	m := Safeguard{Name: "user", InForce: true,
		Text: fmt.Sprintf("workers run as uid %d", found.UID)}
	switch int(found.UID) {
	case 0:
		return Safeguard{Name: "user", Text: "workers run as root",
			Hint: "set worker_user, or run the daemon as a user of its own"}
	case os.Geteuid():
		m.Text = fmt.Sprintf("workers run as the daemon's user, uid %d", found.UID)
	}
	return m
}
