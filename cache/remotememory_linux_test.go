package cache

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/remotes"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

// mostOfFetch is the memory that the helper and the daemon take at most in a fetch of any size. The
// daemon is a test binary here, which has more code.
const mostOfFetch = 64 << 20

// fetching is what a process fetches while its memory is measured.
type fetching struct {
	Remote        remote.Config
	Env           []string
	Model, Public string
}

const fetchingEnvironment = "EPCACHED_TEST_FETCHING"

// A build of 1 GB is fetched with as little memory as a small one.
func TestFetchesOfAGigabyteTakeLittleMemory(t *testing.T) {
	if os.Getenv("EPCACHED_LARGE") == "" {
		t.Skip("NOT TESTED: make remotes sets EPCACHED_LARGE")
	}
	model := largeModel(t, 1_000_000_000)
	self, err := os.Executable()
	require.NoError(t, err)
	for _, kind := range []string{"file", "https", "s3", "oci"} {
		t.Run(kind, func(t *testing.T) {
			f := newFront(t, kind)
			f.private, f.public = fleetKeys(t)
			a := f.publisher(t, f.private)
			made := a.acquire(a.request(a.openFile(model)))
			f.built = portable.Hash(made.Build.BuildKey)
			require.Eventually(t, func() bool { return len(f.allCards(t)) == 1 }, 2*time.Minute,
				100*time.Millisecond)
			a.close()
			text, err := json.Marshal(fetching{f.reads, f.env, model, f.public})
			require.NoError(t, err)
			cmd := exec.Command(self, "-test.run=^TestOfAFetchingProcess$", "-test.v")
			cmd.Env = append(os.Environ(), fetchingEnvironment+"="+string(text))
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, string(out))
			_, said, _ := strings.Cut(string(out), "MEMORY ")
			t.Log(strings.SplitN(said, "\n", 2)[0])
			var helper, daemon int64
			_, err = fmt.Sscanf(said, "helper %d daemon %d", &helper, &daemon)
			require.NoError(t, err, string(out))
			require.Positive(t, helper)
			require.Less(t, helper, int64(mostOfFetch))
			require.Less(t, daemon, int64(mostOfFetch))
		})
	}
}

// TestOfAFetchingProcess is that process.
func TestOfAFetchingProcess(t *testing.T) {
	var of fetching
	text := os.Getenv(fetchingEnvironment)
	if text == "" {
		t.Skip("it is a part of TestFetchesOfAGigabyteTakeLittleMemory")
	}
	require.NoError(t, json.Unmarshal([]byte(text), &of))
	b := unopenedBench(t)
	b.state = filepath.Join(t.TempDir(), "state")
	b.compiler.CheckFault = func(compilers.CheckJob) *compilers.CheckResult { // no load in here
		return &compilers.CheckResult{Outcome: compilers.Passed}
	}
	b.change = func(o *Options) {
		o.RemoteClient = newHelper(t, of.Env...)
		o.Remotes = []remotes.Remote{{Config: of.Remote, Ask: true, Trust: []string{of.Public},
			LoseAtMost: 5 * time.Minute}}
	}
	b.openSound()
	began := time.Now()
	a := b.acquire(b.request(b.openFile(of.Model)))
	require.Equal(t, request.Hit, a.Outcome, a.Why)
	require.Greater(t, a.Build.Files[0].Size+a.Build.Files[1].Size, int64(1_000_000_000))
	var children []byte
	all, err := filepath.Glob("/proc/self/task/*/children") // of the thread that started it
	require.NoError(t, err)
	for _, one := range all {
		more, _ := os.ReadFile(one) // of a thread that has ended
		children = append(children, more...)
	}
	pids := strings.Fields(string(children))
	require.Len(t, pids, 1)
	fmt.Printf("MEMORY helper %d daemon %d bytes, in %v\n", peakMemory(t, pids[0]),
		peakMemory(t, "self"), time.Since(began).Round(time.Millisecond))
}

// peakMemory is the most memory that a process had until now.
func peakMemory(t *testing.T, pid string) int64 {
	text, err := os.ReadFile("/proc/" + pid + "/status")
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(text), "VmHWM:")
	kB, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	require.NoError(t, err)
	return kB << 10
}
