package cache

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/internal/apierr"
)

func (b *bench) doctor(p Peer) (out []Advice) {
	b.Helper()
	reply, err := b.cache.Doctor(context.Background(), p)
	require.NoError(b, err)
	for _, a := range reply.Advice {
		out = append(out, Advice{a.Severity, a.Subject, a.Text, a.Hint})
		require.Contains(b, []string{SeverityProblem, SeverityWarning, SeverityOK}, a.Severity)
		require.NotEmpty(b, a.Text)
		if a.Severity != SeverityOK {
			require.NotEmpty(b, a.Hint, "%s: %s: and what is to be done?", a.Subject, a.Text)
		}
	}
	return out
}

// about gives the only advice on a subject.
func about(t testing.TB, list []Advice, subject string) Advice {
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

func TestDoctorFindsNothingWhereAllIsWell(t *testing.T) {
	b := newBench(t)
	b.acquire(b.request(b.model(1)))
	list := b.doctor(b.self())
	for _, subject := range []string{"runtime " + b.runtime + " " + standin.EP, "clock", "index", "builds", "compiles"} {
		require.Equal(t, SeverityOK, about(t, list, subject).Severity, "%v", about(t, list, subject))
	}
	compiles := b.compiler.Compiles.Load()
	b.doctor(b.self())
	require.Equal(t, compiles, b.compiler.Compiles.Load(), "what was tried a moment ago is not tried again")
}

// What was found out when it was fingerprinted need not hold in this process.
func TestDoctorTriesToLoad(t *testing.T) {
	b := newBench(t)
	b.acquire(b.request(b.model(1)))
	b.compiler.CheckFault = func(compilers.CheckJob) *compilers.CheckResult {
		return &compilers.CheckResult{Outcome: compilers.Failed, Code: 11, Text: "plugin.cpp:54: can't protect"}
	}
	a := about(t, b.doctor(b.self()), "runtime "+b.runtime+" "+standin.EP)
	require.Equal(t, SeverityProblem, a.Severity)
	require.Contains(t, a.Hint, "MemoryDenyWriteExecute")
}

func TestDoctorOnRuntimes(t *testing.T) {
	for _, c := range []struct {
		name    string
		spoil   func(b *bench)
		subject string // after the runtime's name
		text    string
		hint    string
	}{
		{"gone", func(b *bench) { require.NoError(b, os.RemoveAll(b.runtime)) }, "", "no such file", "install it there again"},
		{"without an EP", func(b *bench) { require.NoError(b, os.Remove(b.epLibrary())) }, "", "EP library", "install it there again"},
		{"one that does not load", func(b *bench) { require.NoError(b, os.WriteFile(b.epLibrary(), []byte("garbage"), 0o644)) },
			" " + standin.EP, "does not load with ONNX Runtime 1.31.1", "fit together"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			c.spoil(b)
			a := about(t, b.doctor(b.self()), "runtime "+b.runtime+c.subject)
			require.Equal(t, SeverityProblem, a.Severity)
			require.Contains(t, a.Text, c.text)
			require.Contains(t, a.Hint, c.hint)
		})
	}
}

func (b *bench) epLibrary() string {
	found, err := filepath.Glob(filepath.Join(b.runtime, "libonnxruntime_providers_*.so"))
	require.NoError(b, err)
	require.Len(b, found, 1)
	return found[0]
}

func TestDoctorWithoutRuntimes(t *testing.T) {
	b := newBench(t)
	b.cache.runtimes.Register(nil)
	a := about(t, b.doctor(b.self()), "runtimes")
	require.Equal(t, SeverityProblem, a.Severity)
	require.Contains(t, a.Hint, "--runtime")
}

// The texts are those of real libraries.
func TestDoctorKnowsCauses(t *testing.T) {
	device := []compilers.DeviceFacts{{Type: "CPU", Vendor: "Intel"}}
	for _, c := range []struct {
		name  string
		probe compilers.EPProbe
		mark  string
		text  string
		hint  string
	}{
		{"plugin 1.8.0 on ORT 1.31.1", compilers.EPProbe{Name: "OpenVINOExecutionProvider", Devices: device},
			"compile: ort error 1: Error creating execution provider: [ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Experimental function OrtEpApi_ReleaseEpContextConfig_SinceV28 is not available in this build",
			"not even a model of one node", "1.24.4 to 1.28.0"},
		{"an ORT that is too old", compilers.EPProbe{Name: "OpenVINOExecutionProvider",
			Error: "The requested API version [27] is not available, only API versions [1, 22] are supported in this build. Current ORT Version is: 1.22.0"}, "", "does not load", "older than"},
		{"a missing library", compilers.EPProbe{Name: "QNNExecutionProvider", Error: "libQnnSystem.so: cannot open shared object file: No such file or directory"}, "", "does not load", "is not there"},
		{"half a package", compilers.EPProbe{Name: "QNNExecutionProvider", Devices: device},
			`option "backend_path" of QNNExecutionProvider: there is no library "libQnnHtp.so" beside "/opt/x.so"`, "one node", "whole package"},
		{"noexec", compilers.EPProbe{Name: "QNNExecutionProvider", Error: "x.so: failed to map segment from shared object"}, "", "does not load", "noexec"},
		{"unreadable", compilers.EPProbe{Name: "QNNExecutionProvider", Error: "open /opt/x.so: permission denied"}, "", "does not load", "cannot read"},
		{"no worker", compilers.EPProbe{Name: "QNNExecutionProvider", Error: fmt.Sprintf("%v: epcached-ort: prepare: landlock: permission denied", compilers.ErrStart)}, "",
			"does not load", "beside epcached"},
		{"a crash", compilers.EPProbe{Name: "QNNExecutionProvider", Error: (&compilers.ExitError{Compiler: "QNNExecutionProvider", Signal: "segmentation fault", Name: "SIGSEGV"}).Error()}, "", "does not load", "crashed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := adviseEP("runtime /opt/ort", "1.31.1", c.probe, c.mark, compilers.Fingerprint{})
			require.Equal(t, SeverityProblem, a.Severity)
			require.Contains(t, a.Text, c.text)
			require.Contains(t, a.Hint, c.hint)
		})
	}
	require.Contains(t, adviseUnusable("runtime /opt/ort", "open /opt/ort: "+fs.ErrPermission.Error()).Hint, "cannot read")
	require.Contains(t, whyNoDevice("OpenVINOExecutionProvider", "AuthenticAMD"), "AuthenticAMD")
	require.Empty(t, whyNoDevice("OpenVINOExecutionProvider", "GenuineIntel"))
	require.Empty(t, whyNoDevice("QNNExecutionProvider", "AuthenticAMD"))
	require.Contains(t, adviseEP("runtime /opt/ort", "1.31.1", compilers.EPProbe{Name: "QNNExecutionProvider"}, "", compilers.Fingerprint{}).Text, "no device")
}

func TestDoctorOnTheDisk(t *testing.T) {
	sound := fileSystem{kind: "ext4", free: 100 << 30, size: 500 << 30, freeInodes: 1e6, inodes: 2e6, timesHold: true}
	for _, c := range []struct {
		name     string
		change   func(s *fileSystem)
		severity string
		text     string
	}{
		{"sound", func(*fileSystem) {}, SeverityOK, "100.0 GiB"},
		{"read-only", func(s *fileSystem) { s.readOnly = true }, SeverityProblem, "read-only"},
		{"full", func(s *fileSystem) { s.free = 1 << 20 }, SeverityProblem, "no model is compiled that has to be copied"},
		{"nearly full", func(s *fileSystem) { s.free = 500 << 20 }, SeverityWarning, "500.0 MiB"},
		{"small, and not full", func(s *fileSystem) { s.free, s.size = 500<<20, 900<<20 }, SeverityOK, "500.0 MiB"},
		{"no inodes", func(s *fileSystem) { s.freeInodes = 3 }, SeverityProblem, "inodes"},
		{"few inodes", func(s *fileSystem) { s.freeInodes = 5000 }, SeverityWarning, "5000 inodes"},
		{"makes inodes as it needs them", func(s *fileSystem) { s.freeInodes, s.inodes = 0, 0 }, SeverityOK, ""},
		{"another machine's", func(s *fileSystem) { s.kind, s.network, s.timesHold = "NFS", true, false }, SeverityWarning, "another machine"},
		{"in memory", func(s *fileSystem) { s.kind, s.volatile, s.timesHold = "tmpfs", true, false }, SeverityWarning, "restart"},
		{"times that do not hold", func(s *fileSystem) { s.kind, s.timesHold = "overlay", false }, SeverityWarning, "overlay"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := sound
			c.change(&s)
			a := about(t, adviseDisk("/state", s), "disk")
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
		{"its own", owner{uid: 990, mode: fs.ModeDir | 0o711}, 990, SeverityOK, "alone"},
		{"another's", owner{uid: 1000, mode: fs.ModeDir | 0o711}, 990, SeverityProblem, "belongs to uid 1000"},
		{"writable for the group", owner{uid: 990, mode: fs.ModeDir | 0o771}, 990, SeverityProblem, "others may write"},
		{"root", owner{uid: 0, mode: fs.ModeDir | 0o711}, 0, SeverityWarning, "runs as root"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := about(t, adviseRights("/state", c.o, c.uid), "rights")
			require.Equal(t, c.severity, a.Severity)
			require.Contains(t, a.Text, c.text)
		})
	}
}

func TestDoctorOnTheClock(t *testing.T) {
	b := newBench(t)
	b.acquire(b.request(b.model(1)))
	b.later.Store(int64(-2 * time.Hour))
	a := about(t, b.doctor(b.self()), "clock")
	require.Equal(t, SeverityWarning, a.Severity)
	require.Contains(t, a.Text, "from now")
	require.Equal(t, SeverityProblem, adviseTime(time.Unix(0, 0), time.Unix(0, 0), "it").Severity)
}

func TestDoctorTellsWhatWentWrong(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	require.NoError(t, os.Remove(b.blob(a)))
	b.refused(func() *Request { r := b.request(b.model(1)); r.OnMiss = Fail; return r }())
	for seed := range 3 {
		r := b.request(b.model(2 + uint64(seed)))
		r.EPs[0].Options = map[string]string{"fault": string(standin.Refuse)}
		b.refused(r)
	}
	list := b.doctor(b.self())
	require.Contains(t, about(t, list, "damage").Text, "in the last day: 1")
	require.Contains(t, about(t, list, "compiles").Text, "told to refuse")
	require.NotContains(t, about(t, b.doctor(Peer{UID: 2001}), "compiles").Text, "refuse", "whose models fail is nobody's business")

	b.close()
	require.NoError(t, os.WriteFile(filepath.Join(b.state, "journal"), []byte("garbage"), 0o600))
	b.open()
	require.Contains(t, about(t, b.doctor(b.self()), "index").Text, "damaged journal")
	b.acquire(b.request(b.model(1))) // or it would be found as damaged and served when the test ends
}

func TestDoctorOnWatching(t *testing.T) {
	b := newBench(t)
	require.Equal(t, SeverityOK, about(t, b.doctor(b.self()), "watching").Severity)
	a := adviseHow("/mnt/ort", "polled: the file system is NFS")
	require.Equal(t, SeverityWarning, a.Severity)
	require.Contains(t, a.Text, "/mnt/ort")
	require.Contains(t, a.Text, "NFS")
	require.Contains(t, a.Hint, "fs.inotify.max_user_watches")
}

func TestDoctorIsCancelled(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := b.cache.Doctor(ctx, b.self())
	require.True(t, errors.Is(err, context.Canceled), "%v", err)
}

func TestWhatWasCancelledDidNotFail(t *testing.T) {
	b, g := jobbing(t, 4)
	var ids []string
	for seed := range uint64(4) {
		ids = append(ids, b.later1(seed+1, somebody).Job)
	}
	b.begins(g, 4)
	_, err := b.cache.CancelJobs(context.Background(), Peer{UID: somebody}, ids, false)
	require.NoError(t, err)
	kinds := make(map[string]int)
	for _, e := range b.events(Peer{UID: somebody}) {
		kinds[e.Kind]++
	}
	require.Equal(t, 4, kinds[event.Cancelled])
	require.Zero(t, kinds[event.Failed])
	a := about(t, b.cache.adviseLately(b.self()), "compiles") // the rest compiles something, and compiles wait here
	require.Equal(t, SeverityOK, a.Severity, a.Text)
	require.Contains(t, a.Text, "0 failed")
}

func TestWhatNobodyWaitsForAnyMoreDidNotFail(t *testing.T) {
	b, g := jobbing(t, 4)
	ctx, leave := context.WithCancel(context.Background())
	var asked []<-chan got
	for seed := range uint64(4) {
		asked = append(asked, b.ask(ctx, b.request(b.model(seed+1))))
	}
	b.begins(g, 4)
	leave()
	for _, one := range asked {
		require.Equal(t, apierr.Cancelled, apierr.ClassOf((<-one).err))
	}
	require.Eventually(t, func() bool { return b.cache.flights.count() == 0 }, soon, time.Millisecond)
	require.Zero(t, b.cache.index.Counters.All()["failures"])
	a := about(t, b.cache.adviseLately(b.self()), "compiles")
	require.Equal(t, SeverityOK, a.Severity, a.Text)
	require.Contains(t, a.Text, "0 failed")
	b.cache.flights.mu.Lock()
	defer b.cache.flights.mu.Unlock()
	for _, past := range b.cache.flights.past {
		require.True(t, past.about.inquiry || past.job().State == JobCancelled, past.job().State)
	}
}

func TestAUsersDaemonNeedsNoRuntimeOfItsOwn(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.Runtimes = nil })
	uid := b.cache.uid
	defer func() { b.cache.uid = uid }()
	b.cache.uid = 1000
	require.Equal(t, SeverityOK, about(t, b.doctor(b.self()), "runtimes").Severity)
	b.cache.uid = 0
	require.Equal(t, SeverityProblem, about(t, b.doctor(b.self()), "runtimes").Severity, "whose clients are others, who bring none")
}
