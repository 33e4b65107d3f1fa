package compilers

import (
	"cmp"
	"time"
)

// Limits bound one worker process. A zero field takes the value of DefaultLimits; a negative one means no limit.
type Limits struct {
	Wall        time.Duration // from start to result
	CPU         time.Duration // processor time of each process; whole seconds
	Memory      int64         // bytes: of all memory where workers have cgroups, else of what each process allocates for itself, stacks included
	Output      int64         // bytes of all files that it leaves, and of each single file
	Files       int           // files in the job's folder
	OpenFiles   int64
	Processes   int64 // processes and threads, where workers have cgroups or a user of their own
	Stack       int64 // bytes, of each thread: deep graphs recurse
	Nice        int   // of workers, unless they inherit a higher one
	StderrBytes int   // tail that is kept
}

// DefaultLimits are generous: they stop what has gone wrong, not what is large.
var DefaultLimits = Limits{
	Wall:        30 * time.Minute,
	CPU:         8 * time.Hour,
	Memory:      256 << 30,
	Output:      64 << 30,
	Files:       1024,
	OpenFiles:   4096,
	Processes:   4096,
	Stack:       64 << 20,
	Nice:        5,
	StderrBytes: 64 << 10,
}

func (l Limits) orDefault() Limits {
	d := DefaultLimits
	l.Wall = cmp.Or(l.Wall, d.Wall)
	l.CPU = cmp.Or(l.CPU, d.CPU)
	l.Memory = cmp.Or(l.Memory, d.Memory)
	l.Output = cmp.Or(l.Output, d.Output)
	l.OpenFiles = cmp.Or(l.OpenFiles, d.OpenFiles)
	l.Processes = cmp.Or(l.Processes, d.Processes)
	l.Stack = cmp.Or(l.Stack, d.Stack)
	l.Files = cmp.Or(l.Files, d.Files)
	l.Nice = cmp.Or(l.Nice, d.Nice)
	l.StderrBytes = cmp.Or(l.StderrBytes, d.StderrBytes)
	return l
}
