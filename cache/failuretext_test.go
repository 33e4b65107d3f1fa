package cache

import (
	"context"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
)

// outspoken refuses every model but the smallest, and names the files that it was given, as ONNX
// Runtime does.
type outspoken struct {
	compilers.Compiler
	began chan struct{}
	goOn  chan struct{}
}

func (o outspoken) Compile(ctx context.Context, job compilers.Job,
	progress func(string)) (compilers.Result, error) {
	if filepath.Base(job.Model) == compilers.ProbeModel {
		return o.Compiler.Compile(ctx, job, progress)
	}
	o.began <- struct{}{}
	<-o.goOn
	text := "Load model from " + compilers.Spelling(job.Dir, job.Model) +
		" failed: cannot write " + filepath.Join(job.Dir, job.Output)
	return compilers.Result{Log: "at " + job.Model},
		&compilers.RefusedError{Doing: "compile", Code: 10, Text: text}
}

func TestFailuresNameTheRequestsModel(t *testing.T) {
	b := newBench(t)
	o := outspoken{b.compiler, make(chan struct{}, 1), make(chan struct{})}
	b.wrap = o
	b.reopen()
	ask := func(uid uint32, name string) *request.Request {
		r := b.request(b.model(1))
		r.Peer.UID, r.Name = uid, name
		return r
	}
	says := func(name, text string) {
		t.Helper()
		require.Contains(t, text, `10 INVALID_GRAPH: Load model from `+name+
			` failed: cannot write the compiled `+name)
	}
	first := b.ask(context.Background(), ask(b.cache.uid, "mine.onnx"))
	<-o.began
	second := b.ask(context.Background(), ask(1001, "theirs.onnx"))
	require.Eventually(t, func() bool { return b.waiters() == 2 }, soon, time.Millisecond)
	close(o.goOn)
	for name, answer := range map[string]<-chan got{"mine.onnx": first, "theirs.onnx": second} {
		var e *apierr.Error
		require.ErrorAs(t, (<-answer).err, &e)
		says(name, e.Text)
		require.True(t,
			strings.HasPrefix(e.Text, "model "+strconv.Quote(name)+
				" does not compile: 10 INVALID_GRAPH"), e.Text)
		require.Equal(t, "at "+name, e.Facts["stderr"])
	}
	third := b.refused(ask(1002, "other.onnx"))
	says("other.onnx", third.Text)
	require.Equal(t, "at other.onnx", third.Facts["stderr"])
	for uid, name := range map[uint32]string{b.cache.uid: "mine.onnx", 1002: "other.onnx"} {
		list := b.failures(request.Peer{UID: uid})
		require.Len(t, list, 1)
		says(name, list[0].Text)
		require.Equal(t, "at "+name, list[0].Facts["stderr"])
	}
}
