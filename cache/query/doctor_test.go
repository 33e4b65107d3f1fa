package query

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
)

// adviceOn returns the only advice on a subject.
func adviceOn(t testing.TB, list []Advice, subject string) Advice {
	t.Helper()
	var out []Advice
	for _, a := range list {
		if a.Subject == subject {
			out = append(out, a)
		}
	}
	require.Len(t, out, 1, "%q among %v", subject, list)
	return out[0]
}

// The texts are those of real libraries.
func TestDoctorKnowsCauses(t *testing.T) {
	device := []compilers.DeviceFacts{{Type: "CPU", Vendor: "Intel"}}
	crash := &compilers.ExitError{Compiler: "QNNExecutionProvider", Signal: "segmentation fault",
		Name: "SIGSEGV"}
	killed := &compilers.ExitError{Compiler: "QNNExecutionProvider", Signal: "killed",
		Name: "SIGKILL"}
	_, half := identity.FillOptions("QNNExecutionProvider", nil,
		compilers.EPLibrary{Path: "/opt/x.so"})
	for _, c := range []struct {
		name  string
		probe compilers.EPProbe
		mark  error
		text  string
		hint  string
	}{
		{"plugin 1.8.0 on ORT 1.31.1",
			compilers.EPProbe{Name: "OpenVINOExecutionProvider", Devices: device},
			errors.New("compile: ort error 1: Error creating execution provider: " +
				"[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Experimental function " +
				"OrtEpApi_ReleaseEpContextConfig_SinceV28 is not available in this build"),
			"even a model of one node does not compile", "1.24.4 to 1.28.0"},
		{"an ORT that is too old", compilers.EPProbe{Name: "OpenVINOExecutionProvider",
			Error: "The requested API version [27] is not available, only API versions [1, 22] " +
				"are supported in this build. Current ORT Version is: 1.22.0"}, nil,
			"does not load", "too old"},
		{"a missing library",
			compilers.EPProbe{Name: "QNNExecutionProvider",
				Error: "libQnnSystem.so: cannot open shared object file: No such file or " +
					"directory"}, nil, "does not load", "is missing"},
		{"half a package", compilers.EPProbe{Name: "QNNExecutionProvider", Devices: device},
			half, "one node", "whole package"},
		{"noexec",
			compilers.EPProbe{Name: "QNNExecutionProvider",
				Error: "x.so: failed to map segment from shared object"}, nil, "does not load",
			"noexec"},
		{"unreadable",
			compilers.EPProbe{Name: "QNNExecutionProvider",
				Error: "open /opt/x.so: permission denied"}, nil, "does not load", "cannot read"},
		{"no worker", compilers.EPProbe{Name: "QNNExecutionProvider", Devices: device},
			fmt.Errorf("%w: epcached-ort: prepare: landlock: permission denied",
				compilers.ErrStart), "one node", "beside epcached"},
		{"a crash",
			compilers.EPProbe{Name: "QNNExecutionProvider", Err: crash, Error: crash.Error()}, nil,
			"does not load", "crashed"},
		{"an end from outside",
			compilers.EPProbe{Name: "QNNExecutionProvider", Err: killed, Error: killed.Error()},
			nil, "does not load", "may not fit"},
		{"no answer", compilers.EPProbe{Name: "QNNExecutionProvider", Devices: device},
			fmt.Errorf("compile: %w", compilers.ErrTimeout), "one node", "a driver may be blocked"},
		{"words like ours",
			compilers.EPProbe{Name: "QNNExecutionProvider",
				Error: "compiler crashed: time limit reached: there is no library"}, nil,
			"does not load", "may not fit"},
		{"a disk that is full", compilers.EPProbe{Name: "QNNExecutionProvider", Devices: device},
			fmt.Errorf("stage: %w", syscall.ENOSPC), "one node", "the disk"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := adviseEP("runtime /opt/ort", "1.31.1", c.probe, c.mark, compilers.Fingerprint{})
			require.Equal(t, SeverityProblem, a.Severity)
			require.Contains(t, a.Text, c.text)
			require.Contains(t, a.Hint, c.hint)
		})
	}
	require.Contains(t,
		adviseUnusable("runtime /opt/ort",
			&fs.PathError{Op: "open", Path: "/opt/ort", Err: syscall.EACCES}).Hint, "cannot read")
	require.Contains(t,
		adviseUnusable("runtime /opt/ort", fmt.Errorf("probe: %w", compilers.ErrNotFound)).Hint,
		"moved or removed")
	require.Contains(t, adviseUnusable("runtime /opt/ort", errors.New("not found")).Hint,
		"probe --refresh")
	require.Contains(t,
		adviseEP("runtime /opt/ort", "1.31.1", compilers.EPProbe{Name: "QNNExecutionProvider"}, nil,
			compilers.Fingerprint{}).Text, "no device")
}

func TestDoctorOnTheDisk(t *testing.T) {
	sound := fileSystem{kind: "ext4", free: 100 << 30, size: 500 << 30, freeInodes: 1e6,
		inodes: 2e6, timesHold: true}
	for _, c := range []struct {
		name     string
		change   func(s *fileSystem)
		severity string
		text     string
	}{
		{"sound", func(*fileSystem) {}, SeverityOK, "100.0 GiB"},
		{"read-only", func(s *fileSystem) { s.readOnly = true }, SeverityProblem, "read-only"},
		{"full", func(s *fileSystem) { s.free = 1 << 20 }, SeverityProblem,
			"models that must be copied are not compiled"},
		{"nearly full", func(s *fileSystem) { s.free = 500 << 20 }, SeverityWarning, "500.0 MiB"},
		{"small, and not full", func(s *fileSystem) { s.free, s.size = 500<<20, 900<<20 },
			SeverityOK, "500.0 MiB"},
		{"no inodes", func(s *fileSystem) { s.freeInodes = 3 }, SeverityProblem, "inodes"},
		{"few inodes", func(s *fileSystem) { s.freeInodes = 5000 }, SeverityWarning, "5000 inodes"},
		{"makes inodes as it needs them", func(s *fileSystem) { s.freeInodes, s.inodes = 0, 0 },
			SeverityOK, ""},
		{"another machine's",
			func(s *fileSystem) { s.kind, s.network, s.timesHold = "NFS", true, false },
			SeverityWarning, "network file system"},
		{"in memory",
			func(s *fileSystem) { s.kind, s.volatile, s.timesHold = "tmpfs", true, false },
			SeverityWarning, "restart"},
		{"times that do not hold", func(s *fileSystem) { s.kind, s.timesHold = "overlay", false },
			SeverityWarning, "overlay"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := sound
			c.change(&s)
			a := adviceOn(t, adviseDisk("/state", s), "disk")
			require.Equal(t, c.severity, a.Severity)
			require.Contains(t, a.Text, c.text)
		})
	}
}

func TestDoctorOnRights(t *testing.T) {
	for _, c := range []struct {
		name     string
		o        owner
		uid      uint32
		severity string
		text     string
	}{
		{"its own", owner{uid: 990, mode: fs.ModeDir | 0o711}, 990, SeverityOK, "only by uid 990"},
		{"another's", owner{uid: 1000, mode: fs.ModeDir | 0o711}, 990, SeverityProblem,
			"owned by uid 1000"},
		{"writable for the group", owner{uid: 990, mode: fs.ModeDir | 0o771}, 990, SeverityProblem,
			"other users may write"},
		{"root", owner{uid: 0, mode: fs.ModeDir | 0o711}, 0, SeverityWarning, "runs as root"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := adviceOn(t, adviseRights("/state", c.o, c.uid), "rights")
			require.Equal(t, c.severity, a.Severity)
			require.Contains(t, a.Text, c.text)
		})
	}
}

func TestDoctorOnAClockThatWasNeverSet(t *testing.T) {
	require.Equal(t, SeverityProblem, adviseTime(time.Unix(0, 0), time.Unix(0, 0), "it").Severity)
}

func TestDoctorOnPolling(t *testing.T) {
	a := adviseWatch("/mnt/ort", "polled: the file system is NFS")
	require.Equal(t, SeverityWarning, a.Severity)
	require.Contains(t, a.Text, "/mnt/ort")
	require.Contains(t, a.Text, "NFS")
	require.Contains(t, a.Hint, "fs.inotify.max_user_watches")
}

// The clients of a system's daemon are other users, and may not bring a runtime.
func TestAUsersDaemonNeedsNoRuntimeOfItsOwn(t *testing.T) {
	require.Equal(t, SeverityOK, adviseNoRuntime(1000).Severity)
	require.Equal(t, SeverityProblem, adviseNoRuntime(0).Severity)
}

// Hard limits that a daemon inherited bind all programs, and so does a low one on open files.
func TestDoctorNamesInheritedHardLimits(t *testing.T) {
	for _, h := range runtimes.HardLimits {
		var now unix.Rlimit
		require.NoError(t, unix.Getrlimit(h.Resource, &now))
		bound := unix.Rlimit{Cur: 1 << 50, Max: 1 << 50}
		if h.Least != unix.RLIM_INFINITY {
			bound = unix.Rlimit{Cur: h.Least - 1, Max: h.Least - 1}
		}
		require.NoError(t, unix.Setrlimit(h.Resource, &bound))
		found := adviseLimits()
		_ = unix.Setrlimit(h.Resource, &now) // only root may
		require.Contains(t, fmt.Sprint(found), "the daemon has a hard limit on "+h.What)
	}
}
