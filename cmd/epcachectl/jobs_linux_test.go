package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/modelfile"
	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func someJobs() []*wire.Job {
	return []*wire.Job{
		{Id: "j1", State: "running", Phase: "compiling", ModelName: "det.onnx", Ep: "A",
			ElapsedMs: 12_400, EstimateMs: 30_000, Waiting: 2, Why: "requested"},
		{Id: "j2", State: "queued", Phase: "queued", ModelDigest: "0123456789abcdef", Ep: "B",
			Background: true, Models: 3},
	}
}

func TestJobs(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	require.Equal(t, result{exit.Done, "", "epcachectl: no jobs, and no failures are remembered\n"},
		call(t, "jobs"), "nothing to report")
	require.Equal(t, result{exit.Done, "{\n  \"failures\": [],\n  \"jobs\": []\n}\n", ""},
		call(t, "jobs", "--json"))
	b.set(func() {
		b.jobs = someJobs()
		b.failures = []*wire.Failure{{Build: "fedcba9876543210", ModelName: "bad.onnx", Ep: "A",
			Reason: "crash", Text: "signal 11\nSegmentation fault", Count: 3,
			LastMs: 1, RetryMs: time.Now().Add(10*time.Minute + time.Second/2).UnixMilli()}}
	})
	r := call(t, "jobs")
	require.Equal(t, exit.Done, r.code, r.err)
	require.Equal(t,
		`JOB  STATE    PHASE      ELAPSED  USUALLY  WAITING  MODEL                    EP  WHY
j1   running  compiling  12s      30s      2        det.onnx                 A   requested
j2   queued   queued     0s       -        -        0123456789ab and 2 more  B   -

failed bad.onnx: A, crash, 3 times, the last `+term.Time(1)+`
  signal 11 Segmentation fault
  retried by a request in 10m0s, or after: epcachectl jobs retry fedcba987654
`, r.out)

	out := parseJSON(t, call(t, "jobs", "--json"))
	require.Equal(t, "j1", jsonAt(t, out, "jobs", 0, "id"))
	require.InDelta(t, 30, jsonAt(t, out, "jobs", 0, "estimate_seconds"), 0)
	require.Equal(t, "crash", jsonAt(t, out, "failures", 0, "reason"))
}

func TestWhenFailuresAreTriedAgain(t *testing.T) {
	now := time.UnixMilli(1_000_000)
	for at, says := range map[int64]string{0: "when the libraries or the model change",
		999_000: "by the next request", 1_090_000: "in 1m30s"} {
		require.Contains(t, retryOf(&wire.Failure{RetryMs: at}, now), says)
	}
}

func TestJobsFollow(t *testing.T) {
	failed := &wire.Error{Class: wire.ErrorClass_COMPILE_FAILED, Text: "compiler crashed (SIGSEGV)",
		Hint: "another precision may do"}
	cases := map[string]struct {
		job  *wire.Job
		code int
		out  string
		err  string
	}{
		"done": {&wire.Job{State: "done", ModelName: "det.onnx", Ep: "A", Build: "0123456789abcdef",
			ElapsedMs: 2500}, exit.Done,
			"done det.onnx: A build 0123456789ab in 2.5s\n", ""},
		"failed": {&wire.Job{State: "failed", ModelName: "det.onnx", Error: failed}, exit.Failed,
			"",
			"epcachectl: compile \"det.onnx\": compiler crashed (SIGSEGV)\nepcachectl: hint: " +
				"another precision may do\n"},
		"cancelled": {&wire.Job{State: "cancelled", ModelName: "det.onnx"}, exit.Failed, "",
			"epcachectl: compile \"det.onnx\": it was cancelled\n"},
		"of no known end": {&wire.Job{State: "lost", ModelName: "det.onnx"}, exit.Failed, "",
			"epcachectl: compile \"det.onnx\": job j is lost\n"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			b := newStandIn(t)
			tc.job.Id = "j"
			b.jobs = []*wire.Job{tc.job}
			b.serve()
			phase := "epcachectl: compiling j, about 3s in all\n"
			require.Equal(t, result{tc.code, tc.out, phase + tc.err},
				call(t, "jobs", "follow", "j"))

			r := call(t, "jobs", "follow", "j", "--json")
			require.Equal(t, tc.code, r.code)
			require.Equal(t, tc.job.GetState(), jsonAt(t, parseJSON(t, r), "state"))
			require.Empty(t, r.err, "a script reads the result")
		})
	}
	t.Run("no such job", func(t *testing.T) {
		newStandIn(t).serve()
		require.Equal(t, result{exit.NotFound, "", "epcachectl: follow \"j\": no such job\n"},
			call(t, "jobs", "follow", "j"))
	})
}

func TestJobsCancelAndRetry(t *testing.T) {
	b := newStandIn(t)
	b.jobs = someJobs()
	b.failures = []*wire.Failure{{Build: "fedcba", ModelName: "bad.onnx", Ep: "A",
		Reason: "timeout"}, {Build: "abcdef", ModelName: "worse.onnx", Ep: "A", Reason: "crash"}}
	b.serve()
	require.Equal(t, "would cancel 0123456789ab and 2 more: B, job j2\n",
		call(t, "jobs", "cancel", "j2", "-n").out)
	require.Equal(t, "would forget bad.onnx: A, timeout\n",
		call(t, "jobs", "retry", "fed", "-n").out)
	require.Equal(t, "would forget worse.onnx: A, crash\n",
		call(t, "jobs", "retry", "worse.onnx", "-n").out)
	require.Equal(t, result{exit.NotFound, "", "epcachectl: jobs cancel: no job " +
		"\"k\"\nepcachectl: hint: list jobs: epcachectl jobs\n"},
		call(t, "jobs", "cancel", "k", "-n"))
	require.Equal(t, result{exit.NotFound, "", "epcachectl: jobs retry: no remembered failure " +
		"of \"k\"\nepcachectl: hint: list jobs: epcachectl jobs\n"},
		call(t, "jobs", "retry", "k", "-n"))
	require.Equal(t, exit.BadUsage, call(t, "jobs", "cancel", "j").code, "which one?")
	require.Empty(t, b.changed())

	ended := someJobs()
	ended[1].State = "cancelled"
	b.set(func() { b.jobs = ended })
	require.Equal(t, "left det.onnx to the other callers: A, job j1\ncancelled 0123456789ab "+
		"and 2 more: B, job j2\n", call(t, "jobs", "cancel", "j1", "j2").out)
	over := someJobs()
	over[0].State, over[1].State = "done", "failed"
	b.set(func() { b.jobs = over })
	require.Equal(t, "det.onnx has already ended: A, job j1\n0123456789ab and 2 more has failed "+
		"already: B, job j2\n", call(t, "jobs", "cancel", "j1", "j2").out)
	require.Contains(t, call(t, "jobs", "retry", "fedcba").out, "forgot bad.onnx: A, timeout\n")
	require.Equal(t, exit.Done, call(t, "jobs", "cancel", "--all").code)
	require.Equal(t, exit.Done, call(t, "jobs", "retry", "--all", "--json").code)
	require.Equal(t,
		[]string{"cancel j1 j2", "cancel j1 j2", "retry fedcba", "cancel all", "retry all"},
		b.changed())
	for _, args := range [][]string{{"cancel"}, {"retry"}, {"cancel", "--all", "j1"},
		{"retry", "--all", "x"}, {"follow"}, {"list"}} {
		require.Equal(t, exit.BadUsage, call(t, append([]string{"jobs"}, args...)...).code, args)
	}
}

func TestJobByTheBeginningOfItsName(t *testing.T) {
	listed := []*wire.Job{{Id: "ab"}, {Id: "abc"}, {Id: "xyz"}}
	for name, want := range map[string]string{"x": "xyz", "xyz": "xyz", "ab": "ab", "abc": "abc",
		"q": "q"} {
		got, err := jobID(listed, name)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	_, err := jobID(listed, "a")
	require.ErrorContains(t, err, "2 jobs have this prefix")
}

func TestJobsNotAllowed(t *testing.T) {
	b := newStandIn(t)
	b.err = &unixsock.Error{Class: wire.ErrorClass_NOT_ALLOWED, Text: "job j1 is another user's"}
	b.serve()
	require.Equal(t,
		result{exit.NotAllowed, "", "epcachectl: jobs cancel: job j1 is another user's\n"},
		call(t, "jobs", "cancel", "j1"))
}

func TestMissingEntryIsNamedAsGiven(t *testing.T) {
	b := newStandIn(t)
	model := tinyModel(t, "m.onnx")
	entry, err := modelfile.Entry(t.Context(), model)
	require.NoError(t, err)
	b.err = &unixsock.Error{Class: wire.ErrorClass_NOT_FOUND,
		Text: `nothing is known of "` + entry + `"`}
	b.serve()
	for _, verb := range []string{"show", "why"} {
		require.Contains(t, call(t, verb, model).err, "nothing is known of \""+model+"\"\n", verb)
	}
	require.Equal(t,
		result{exit.NotFound, "", "epcachectl: jobs retry: nothing is known of \"" + model +
			"\"\n"}, call(t, "jobs", "retry", model))
	require.Equal(t,
		result{exit.NotFound, "", "epcachectl: rm: nothing is known of \"" + model + "\"\n"},
		call(t, "rm", model))
	require.Equal(t,
		result{exit.NotFound, "", "epcachectl: invalidate: nothing is known of \"" + model +
			"\"\n"}, call(t, "invalidate", model))
	require.Equal(t,
		result{exit.NotFound, "", "epcachectl: pin: nothing is known of \"" + model + "\"\n"},
		call(t, "pin", model))
	b.set(func() {
		b.err = &unixsock.Error{Class: wire.ErrorClass_BAD_REQUEST,
			Text: `"` + entry + `" matches 2 entries`, Hint: "epcachectl show " + entry}
	})
	require.Equal(t, "epcachectl: why \""+model+"\": \""+model+"\" matches 2 entries\n"+
		"epcachectl: hint: ask what get would do: epcachectl why "+model+" --ep EP\n"+
		"epcachectl: hint: epcachectl show "+model+"\n", call(t, "why", model).err)
}

func TestAnEmptyListSaysSo(t *testing.T) {
	b := newStandIn(t)
	b.builds = []*wire.Build{}
	b.serve()
	require.Equal(t, result{exit.Done, "", "epcachectl: no builds of model \"x\" for \"A\"\n"},
		call(t, "list", "--model", "x", "--ep", "A"))
	require.Equal(t, result{exit.Done, "[]\n", ""}, call(t, "list", "--json"))
}
