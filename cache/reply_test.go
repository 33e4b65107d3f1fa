package cache

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/joblist"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// A digest that was not computed is absent, not zeros.
func TestUnkeptFilesHaveNoDigest(t *testing.T) {
	b := &index.Build{EPs: []index.EPFacts{{Name: "X"}},
		Files: []index.File{{Name: "a_ctx.onnx", Size: 3}, {Name: "a.bin", Size: 4}}}
	b.Files[1].Digest[0] = 1
	reply := (&request.Answer{Outcome: request.Compiled, Build: b, Unkept: true,
		Graph: "f00d/a_ctx.onnx"}).Reply()
	require.True(t, reply.Unkept)
	require.Empty(t, reply.Files[0].Digest)
	require.Equal(t, b.Files[1].Digest.String(), reply.Files[1].Digest)
}

// fill gives every exported field below v some value that is not its zero.
func fill(v reflect.Value) {
	switch v.Type() {
	case reflect.TypeFor[time.Time]():
		v.Set(reflect.ValueOf(time.UnixMilli(12345)))
		return
	case reflect.TypeFor[error]():
		v.Set(reflect.ValueOf(errors.New("x")))
		return
	case reflect.TypeFor[*os.File]():
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint8, reflect.Uint32, reflect.Uint64:
		v.SetUint(1)
	case reflect.Float64:
		v.SetFloat(0.5)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Array:
		for i := range v.Len() {
			fill(v.Index(i))
		}
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key)
		fill(value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(v.Field(i))
			}
		}
	}
}

func filled[T any]() *T {
	v := new(T)
	fill(reflect.ValueOf(v).Elem())
	return v
}

// unset lists the fields of a message, and of those in it, that have no value.
func unset(prefix string, m protoreflect.Message) (names []string) {
	for i := range m.Descriptor().Fields().Len() {
		field := m.Descriptor().Fields().Get(i)
		name := prefix + string(field.Name())
		switch {
		case !m.Has(field):
			names = append(names, name)
		case field.IsList() && field.Message() != nil:
			names = append(names, unset(name+".", m.Get(field).List().Get(0).Message())...)
		case !field.IsList() && !field.IsMap() && field.Message() != nil:
			names = append(names, unset(name+".", m.Get(field).Message())...)
		}
	}
	return names
}

// Replies have all that the cache knows: a field that is added to one side and not carried over
// fails here.
func TestRepliesHaveAllFields(t *testing.T) {
	answer := filled[request.Answer]()
	answer.Encoded = nil // it would be the whole reply
	cases := map[string]struct {
		reply proto.Message
		empty []string // filled in elsewhere
	}{
		"answer": {answer.Reply(), []string{"fd", "elapsed_seconds"}},
		"event":  {event.Reply(filled[index.Event]()), nil},
		"failure": {joblist.Reply(nil, []failure.Failure{*filled[failure.Failure]()}).Failures[0],
			nil},
		"runtime": {query.FactsReply(filled[runtimes.Facts]()), nil},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, tc.empty, unset("", tc.reply.ProtoReflect()))
		})
	}
}

// However many failures there are, and however much they said, they fit: the newest with all that
// they said.
func TestFailuresFitIntoAnAnswer(t *testing.T) {
	words := strings.Repeat("x", 4<<10)
	list := make([]failure.Failure, 2048)
	for i := range list {
		list[i] = failure.Failure{ModelName: "m.onnx", Text: words,
			Facts: map[string]string{"reason": "crash", "stderr": words}}
	}
	reply := joblist.Reply(nil, list)
	require.LessOrEqual(t, proto.Size(reply), wire.MaxReply)
	require.Greater(t, len(reply.Failures), 500)
	require.Equal(t, words, reply.Failures[0].Facts["stderr"])
	last := reply.Failures[len(reply.Failures)-1]
	require.Equal(t, "crash", last.Facts["reason"])
	require.Len(t, last.Text, 256)
	require.Equal(t, words, list[len(list)-1].Facts["stderr"], "the cache's own are left alone")
}

func TestUnknownValuesAreOmitted(t *testing.T) {
	build := &wire.Build{}
	judge.Judgement{}.FillBuild(build)
	require.Empty(t, build.Compatibility, "nobody judged it")
	require.Zero(t, build.JudgedMs)
	event := event.Reply(&index.Event{})
	require.Empty(t, event.RequestKey, "an event of the machine")
	require.Empty(t, event.Build)
	require.Zero(t, event.AtMs)
	require.Empty(t, (&request.Answer{Outcome: request.PassThrough}).Reply().RequestKey)
}

func TestUnknownJudgement(t *testing.T) {
	build := &wire.Build{}
	judge.Judgement{Reason: "no rule speaks of it", Runtime: "/opt/ort"}.FillBuild(build)
	require.Equal(t, "unknown", build.Compatibility)
}

// Answers contain texts of compilers and drivers, and must be encodable with any of them.
func TestTextThatIsNone(t *testing.T) {
	bad := "not \xff text"
	build := &wire.Build{}
	judge.Judgement{Reason: bad}.FillBuild(build)
	for _, reply := range []proto.Message{
		event.Reply(&index.Event{ModelName: bad, Text: bad, Runtime: bad}),
		&wire.Candidate{Build: build},
		joblist.Reply([]jobs.Info{jobs.Info{ModelName: bad, Why: bad,
			Err: &apierr.Error{Class: apierr.CompileFailed, Text: bad, Hint: bad,
				Facts: map[string]string{"stderr": bad}}}}, nil),
		(&request.Progress{Detail: bad}).Reply(),
		joblist.Reply(nil,
			[]failure.Failure{failure.Failure{ModelName: bad, Text: bad,
				Facts: map[string]string{"stderr": bad}}}),
		(&request.Answer{Why: bad, Compatibility: judge.Judgement{Reason: bad}}).Reply(),
		query.FactsReply(&runtimes.Facts{Err: errors.New(bad)}),
	} {
		_, err := proto.Marshal(reply)
		require.NoError(t, err)
	}
}

func TestExplanationOfManyEventsFitsIntoAFrame(t *testing.T) {
	b := newBench(t)
	// sent twice, which is too often
	out := &wire.Explanation{Record: strings.Repeat("x", 600<<10), Reason: "why"}
	b.cache.Queries.AddHistory(b.self(), index.RequestKey{1}, out)
	answer := (&request.Answer{Record: strings.Repeat("x", 600<<10), Explanation: out}).Reply()
	require.Less(t, proto.Size(answer), wire.MaxFrame)
	require.Equal(t, "why", answer.Explanation.Reason)
}

func TestEventsFitIntoAFrame(t *testing.T) {
	b := newBench(t)
	for i := range 300 {
		b.cache.Store.RecordEvent(index.Event{Kind: event.Changed,
			Text: fmt.Sprint(i, strings.Repeat("x", 10<<10))})
	}
	reply, err := b.cache.Queries.Events(t.Context(), b.self(), time.Time{}, 0)
	require.NoError(t, err)
	require.Less(t, proto.Size(reply), wire.MaxFrame)
	require.Greater(t, proto.Size(reply), wire.MaxFrame*3/4, "as many as fit")
	require.True(t, strings.HasPrefix(reply.Events[len(reply.Events)-1].Text, "299x"),
		"the newest, and oldest first")
	require.Less(t, reply.Events[0].Sequence, reply.Events[1].Sequence)
	reply, err = b.cache.Queries.Events(t.Context(), b.self(), time.Time{}, 3)
	require.NoError(t, err)
	require.Len(t, reply.Events, 3)
}
