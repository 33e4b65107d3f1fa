package runtimes

import "golang.org/x/sys/unix"

// HardLimit is a hard limit that a daemon, and so its workers, keep for all programs.
type HardLimit struct {
	Resource int
	What     string
	Least    uint64 // with less it binds
}

// HardLimits are those that a daemon should not inherit.
var HardLimits = []HardLimit{
	{unix.RLIMIT_AS, "its address space (ulimit -v)", unix.RLIM_INFINITY},
	{unix.RLIMIT_DATA, "its data (ulimit -d)", unix.RLIM_INFINITY},
	{unix.RLIMIT_CPU, "its processor time (ulimit -t)", unix.RLIM_INFINITY},
	{unix.RLIMIT_FSIZE, "the size of its files (ulimit -f)", unix.RLIM_INFINITY},
	{unix.RLIMIT_NOFILE, "its open files (ulimit -n)", 256},
}

// Bound returns this process's hard limit if it binds.
func (h HardLimit) Bound() (limit uint64, binds bool) {
	var l unix.Rlimit
	err := unix.Getrlimit(h.Resource, &l)
	return l.Max, err == nil && l.Max < h.Least
}
