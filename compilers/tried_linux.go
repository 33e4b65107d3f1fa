package compilers

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/epcached/epcached/compilers/dialogue"
	"github.com/epcached/epcached/internal/bytesize"
)

// patience is how long a worker may take that loads nothing. Others who ask wait as long.
const patience = 10 * time.Second

type tried struct {
	mu       sync.Mutex // guards measures
	measures []Measure
}

// Sandbox implements Sandboxed.
func (o *ORT) Sandbox(ctx context.Context) ([]Measure, error) {
	o.tried.mu.Lock()
	defer o.tried.mu.Unlock()
	if o.tried.measures != nil {
		return o.tried.measures, nil
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	found, err := o.try(ctx)
	if err != nil {
		return nil, fmt.Errorf("sandbox: %w", err)
	}
	o.tried.measures = o.measures(found)
	return o.tried.measures, nil
}

// try lets a worker try to read and to write in a folder beside its own that its user may read and write.
func (o *ORT) try(ctx context.Context) (dialogue.Confined, error) {
	outside, err := o.scratch()
	if err != nil {
		return dialogue.Confined{}, err
	}
	defer o.drop(outside)
	bait := filepath.Join(outside, "bait")
	if err := os.WriteFile(bait, []byte("bait"), 0o600); err != nil {
		return dialogue.Confined{}, err
	}
	if err := o.chown(outside, []string{"bait"}, o.opts.User); err != nil {
		return dialogue.Confined{}, err
	}
	done, err := o.scratchJob(ctx, dialogue.Request{Do: dialogue.Try, Model: bait, Output: filepath.Join(outside, "made")}, Pace{}, nil)
	if err != nil {
		return dialogue.Confined{}, err
	}
	if done.Confined == nil {
		return dialogue.Confined{}, fmt.Errorf("%w: the worker did not say what it tried", dialogue.ErrMalformed)
	}
	return *done.Confined, nil
}

func (o *ORT) measures(found dialogue.Confined) []Measure {
	way, groups := o.host.current(), o.host.groups
	if !found.Cgroup {
		groups = nil // there are none, or the namespace needs none
	}
	return []Measure{
		files(found), o.network(found), processes(way, groups), o.memory(groups), o.count(way, groups), privileges(found), o.user(found),
	}
}

func files(found dialogue.Confined) Measure {
	m := Measure{Name: "files", InForce: !found.Reads && !found.Writes}
	switch {
	case m.InForce:
		m.Text = fmt.Sprintf("workers write only into their job's folder, and do not see the store (Landlock ABI %d)", found.Landlock)
	case found.Landlock == 0:
		m.Text, m.Hint = "this kernel has no Landlock: workers may do with files what their user may", "a kernel since 5.13 with landlock among lsm= has it; worker_user helps a daemon that runs as root"
	default:
		m.Text, m.Hint = "a worker reached a file outside its folder", "see [sandbox] in the configuration"
	}
	return m
}

func (o *ORT) network(found dialogue.Confined) Measure {
	m := Measure{Name: "network", InForce: !found.Connects}
	switch {
	case m.InForce && found.Landlock >= 4:
		m.Text = "workers get no sockets (seccomp, and Landlock for TCP)"
	case m.InForce:
		m.Text = "workers get no sockets (seccomp)"
	case o.opts.Sandbox.Network:
		m.Text, m.Hint = "the configuration lets workers use the network", "set network = false in [sandbox], if no vendor's compiler needs it"
	default:
		m.Text, m.Hint = "this kernel filters no system calls: workers may use the network", "a kernel with CONFIG_SECCOMP_FILTER can forbid it"
	}
	return m
}

func processes(way isolation, groups *cgroups) Measure {
	m := Measure{Name: "processes", InForce: true}
	switch {
	case way.namespace && way.user:
		m.Text = "nothing that a worker starts outlives it (pid namespace, in a user namespace)"
	case way.namespace:
		m.Text = "nothing that a worker starts outlives it (pid namespace)"
	case groups != nil:
		m.Text = "nothing that a worker starts outlives it (cgroup.kill)"
	default:
		m.InForce = false
		m.Text = "what a worker starts is killed by the process that looks after it, which is certain only if that is not killed itself"
		m.Hint = "let the daemon make pid namespaces, as root or in user namespaces, or give it a cgroup of its own (Delegate=yes)"
	}
	return m
}

func (o *ORT) memory(groups *cgroups) Measure {
	if groups != nil && groups.memory {
		return Measure{Name: "memory", InForce: true, Text: fmt.Sprintf("%s for all processes of a worker (cgroup)", bytesize.Text(o.opts.Limits.Memory))}
	}
	return Measure{Name: "memory", Text: fmt.Sprintf("no cgroup: %s that each process allocates for itself, and nothing for what processes share", bytesize.Text(o.opts.Limits.Memory)),
		Hint: "give the daemon a cgroup of its own with the memory controller (Delegate=memory pids)"}
}

func (o *ORT) count(way isolation, groups *cgroups) Measure {
	m := Measure{Name: "process limit", InForce: true}
	switch {
	case groups != nil && groups.pids:
		m.Text = fmt.Sprintf("%d for each worker (cgroup)", o.opts.Limits.Processes)
	case o.countsProcesses(way):
		m.Text = fmt.Sprintf("%d (of the workers' user)", o.opts.Limits.Processes)
	default:
		m.InForce, m.Text = false, "no cgroup, and no user of the workers' own that the kernel could count for"
		m.Hint = "give the daemon a cgroup of its own with the pids controller, or set worker_user"
	}
	return m
}

func privileges(found dialogue.Confined) Measure {
	if found.Privileged || !found.Seccomp {
		return Measure{Name: "privileges", Text: "workers have privileges, or system calls, that they have no use for",
			Hint: "run the daemon as a user of its own, on a kernel that filters system calls"}
	}
	return Measure{Name: "privileges", InForce: true, Text: "none beyond files; calls that reach other processes or leave objects behind are refused (seccomp)"}
}

func (o *ORT) user(found dialogue.Confined) Measure {
	m := Measure{Name: "user", InForce: true, Text: fmt.Sprintf("workers run as uid %d", found.UID)}
	switch int(found.UID) {
	case 0:
		return Measure{Name: "user", Text: "workers run as root", Hint: "set worker_user, or run the daemon as a user of its own"}
	case os.Geteuid():
		m.Text = fmt.Sprintf("workers run as the daemon's user, uid %d", found.UID)
	}
	return m
}
