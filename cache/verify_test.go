package cache

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
)

// verifying is a request that wants its output compared.
func (b *bench) verifying(most float64) *request.Request {
	r := b.request(b.model(1))
	r.VerifyOutput = most
	return r
}

// outputDiffers is a comparison of outputs that finds a difference.
func outputDiffers(compilers.VerifyJob) compilers.VerifyResult {
	return compilers.VerifyResult{Outcome: compilers.Failed,
		Text: `output "y" of shape [1 8]: value 3 is 0.5, and 0.25 in the source model: ` +
			`more than 0.01 apart`}
}

func TestOutputIsComparedWhereAskedFor(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.verifying(0.01))
	require.Equal(t, request.Compiled, a.Outcome)
	require.Equal(t, 0.01, a.Build.VerifiedOutput)
	require.EqualValues(t, 1, b.compiler.Comparisons.Load())
	b.reopen()
	again := b.acquire(b.verifying(0.02))
	require.Equal(t, request.Hit, again.Outcome)
	require.Equal(t, 0.01, again.Build.VerifiedOutput, "its record says so")
	require.EqualValues(t, 1, b.compiler.Comparisons.Load(),
		"what passed with a smaller tolerance passes")
	require.Empty(t, again.Warnings)
	b.acquire(b.verifying(0.001))
	require.EqualValues(t, 2, b.compiler.Comparisons.Load(),
		"and with a smaller one it is compared again")
}

func TestOutputIsNotComparedWhereNotAskedFor(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	require.Zero(t, a.Build.VerifiedOutput)
	require.Zero(t, b.compiler.Comparisons.Load())
}

func TestVerifyingIsNoPartOfTheKey(t *testing.T) {
	b := newBench(t)
	require.Equal(t, b.acquire(b.request(b.model(1))).RequestKey,
		b.acquire(b.verifying(0.5)).RequestKey)
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

// a hit on a build that was not compared is compared then, once for each tolerance
func TestHitIsComparedOnce(t *testing.T) {
	b := newBench(t)
	made := b.acquire(b.request(b.model(1)))
	for range 3 {
		a := b.acquire(b.verifying(0.01))
		require.Equal(t, request.Hit, a.Outcome)
		require.Equal(t, made.Build.ID, a.Build.ID)
	}
	require.EqualValues(t, 1, b.compiler.Comparisons.Load())
	b.reopen()
	b.acquire(b.verifying(0.01))
	require.EqualValues(t, 1, b.compiler.Comparisons.Load(), "it is remembered")
	b.acquire(b.verifying(0.001))
	require.EqualValues(t, 2, b.compiler.Comparisons.Load(),
		"a smaller tolerance is another question")
}

func TestDifferentOutputIsRefusedToTheRequester(t *testing.T) {
	b := newBench(t)
	b.compiler.Comparison = outputDiffers
	for range 2 {
		e := b.refused(b.verifying(0.01))
		require.Equal(t, apierr.CompileFailed, e.Class)
		require.Contains(t, e.Text,
			`output "y" of shape [1 8]: value 3 is 0.5, and 0.25 in the source model`)
		require.Equal(t, "output differs", e.Facts["reason"])
	}
	require.EqualValues(t, 1, b.compiler.Compiles.Load(), "the compile is not lost for that")
	a := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, a.Outcome, "others did not ask")
	require.Zero(t, a.Build.VerifiedOutput)
}

func TestNoToleranceIsProposedForOutputsOfOtherSizes(t *testing.T) {
	for sizes, hint := range map[bool]string{true: "no tolerance accepts", false: "larger"} {
		b := newBench(t)
		b.compiler.Comparison = func(compilers.VerifyJob) compilers.VerifyResult {
			return compilers.VerifyResult{Outcome: compilers.Failed, Text: "so", Outputs: 1,
				Sizes: sizes}
		}
		require.Contains(t, b.refused(b.verifying(0.01)).Hint, hint)
	}
}

func TestVerificationReportsTheDifference(t *testing.T) {
	for outputs, fact := range map[int]string{0: "0", 2: "2"} { // 0: it did not run
		b := newBench(t)
		b.compiler.Comparison = func(compilers.VerifyJob) compilers.VerifyResult {
			return compilers.VerifyResult{Outcome: compilers.Failed, Text: "so", Outputs: outputs}
		}
		require.Equal(t, fact, b.refused(b.verifying(0.01)).Facts["outputs"])
	}
}

func TestOutputThatCannotBeComparedIsServedAndToldOf(t *testing.T) {
	b := newBench(t)
	b.compiler.Comparison = func(compilers.VerifyJob) compilers.VerifyResult {
		return compilers.VerifyResult{Outcome: compilers.NotCheckable,
			Text: "the device is elsewhere"}
	}
	a := b.acquire(b.verifying(0.01))
	require.Zero(t, a.Build.VerifiedOutput)
	require.Contains(t, a.Warnings,
		"output not verified, cannot be tested here: the device is elsewhere")
	own := b.request(b.own())
	own.VerifyOutput = 0.01
	passed := b.acquire(own)
	require.Equal(t, request.PassThrough, passed.Outcome)
	require.Contains(t, passed.Warnings,
		"output not verified, cannot be tested here: the model is "+
			"compiled already, so there is no source to compare with")
}

func TestFailedVerificationIsRetried(t *testing.T) {
	b := newBench(t)
	b.compiler.Comparison = func(compilers.VerifyJob) compilers.VerifyResult {
		return compilers.VerifyResult{Outcome: compilers.NotCheckable, Text: "not now"}
	}
	require.Len(t, b.acquire(b.verifying(0.01)).Warnings, 1)
	before := b.compiler.Comparisons.Load()
	b.acquire(b.verifying(0.01))
	require.Equal(t, before, b.compiler.Comparisons.Load(), "not at once")
	b.compiler.Comparison = nil
	b.later.Add(int64(2 * runtimes.FailureLifetime))
	require.Empty(t, b.acquire(b.verifying(0.01)).Warnings)
}

// what was unkept is compared as well
func TestUnkeptOutputIsVerified(t *testing.T) {
	b := newBench(t)
	r := b.verifying(0.01)
	r.Store = "none"
	require.Equal(t, 0.01, b.acquire(r).Build.VerifiedOutput)
	b.compiler.Comparison = outputDiffers
	require.Contains(t, b.refused(r).Text, "value 3")
}

// the other form is a build of its own, which was not compared
func TestConvertedOutputIsCompared(t *testing.T) {
	b := newBench(t)
	b.acquire(b.verifying(0.01))
	r := b.verifying(0.01)
	r.Embed = true
	a := b.acquire(r)
	require.Equal(t, request.Hit, a.Outcome)
	require.Zero(t, a.Build.VerifiedOutput)
	require.EqualValues(t, 2, b.compiler.Comparisons.Load())
}

func TestManyAskForOneComparison(t *testing.T) {
	b := newBench(t)
	b.acquire(b.request(b.model(1)))
	requests := make([]*request.Request, 8)
	for i := range requests {
		requests[i] = b.verifying(0.01)
	}
	var wait sync.WaitGroup
	for _, r := range requests {
		wait.Go(func() {
			if a, err := b.cache.Acquire(context.Background(), r, nil); err == nil {
				_ = a.View.Close()
			}
		})
	}
	wait.Wait()
	require.EqualValues(t, 1, b.compiler.Comparisons.Load())
}

func TestToleranceIsANumber(t *testing.T) {
	b := newBench(t)
	require.Equal(t, apierr.BadRequest, b.refused(b.verifying(-1)).Class)
}

// Comparisons of one user's that do not end leave a slot to others.
func TestComparisonsOfOneUserHoldNotAllSlots(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.Jobs = 2 })
	const slow, quick = 0.01, 0.02
	end, began := make(chan struct{}), make(chan struct{}, 3)
	b.compiler.Comparison = func(job compilers.VerifyJob) compilers.VerifyResult {
		if job.Most == slow {
			began <- struct{}{}
			<-end
		}
		return compilers.VerifyResult{Outcome: compilers.Passed}
	}
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer close(end)
	for seed := range uint64(3) {
		b.acquire(b.request(b.model(seed)))
		r := b.request(b.model(seed))
		r.Peer.UID, r.VerifyOutput = somebody, slow
		waiting.Go(func() {
			if a, err := b.cache.Acquire(context.Background(), r, nil); err == nil {
				_ = a.View.Close()
			}
		})
	}
	<-began
	<-began
	r := b.verifying(quick)
	r.Peer.UID = somebodyElse
	require.Empty(t, b.acquire(r).Warnings)
}

// Comparisons that do not end, of as many users as there are slots, keep no compile of another user
// waiting, and no load check.
func TestComparisonsHoldNoCompileSlot(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.Jobs = 2 })
	end, began := make(chan struct{}), make(chan struct{}, 4)
	b.compiler.Comparison = func(compilers.VerifyJob) compilers.VerifyResult {
		began <- struct{}{}
		<-end
		return compilers.VerifyResult{Outcome: compilers.Passed}
	}
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer close(end)
	for seed := range uint64(2) {
		r := b.request(b.model(seed)) // a miss: it is compared before it is stored
		r.Peer.UID, r.VerifyOutput = somebody+uint32(seed), 0.01
		waiting.Go(func() {
			if a, err := b.cache.Acquire(context.Background(), r, nil); err == nil {
				_ = a.View.Close()
			}
		})
	}
	<-began
	<-began
	r := b.request(b.model(7))
	r.Peer.UID = somebodyElse + 1
	require.Equal(t, request.Compiled, b.acquire(r).Outcome)
}
