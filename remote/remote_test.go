package remote

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/epcached/epcached/portable"
)

// The test binary plays helpers that are not as they should be.
func TestMain(m *testing.M) {
	if how := os.Getenv("EPCACHED_REMOTE_TEST_HELPER"); how != "" {
		play(how)
		return
	}
	goleak.VerifyTestMain(m)
}

func play(how string) {
	if how == "crash" {
		os.Exit(3)
	}
	f := os.NewFile(3, "control")
	c, err := net.FileConn(f)
	if err != nil {
		os.Exit(4)
	}
	control := c.(*net.UnixConn)
	for {
		files, err := Receive(control, new(struct{}))
		if err != nil {
			os.Exit(0)
		}
		c, err := net.FileConn(files[0])
		if err != nil {
			os.Exit(5)
		}
		go answerWrongly(how, c.(*net.UnixConn))
	}
}

// answerWrongly answers a request wrongly.
func answerWrongly(how string, c *net.UnixConn) {
	var r Request
	files, _ := Receive(c, &r)
	CloseAll(files)
	switch how {
	case "once": // idle just as the request came
		os.Exit(0)
	case "crash later":
		os.Exit(3)
	case "hang":
		select {}
	case "garbage":
		_, _ = c.Write([]byte("\x05\x00\x00\x00hello"))
	case "huge":
		_, _ = c.Write([]byte("\xff\xff\xff\xffhello"))
	case "empty":
		_, _ = c.Write(make([]byte, 4))
	case "cut":
		_, _ = c.Write([]byte("\x05\x00\x00\x00he"))
	case "endless progress":
		for Send(c, &Answer{Progress: &Progress{Done: 1}}, nil) == nil {
		}
	case "many cards":
		_ = Send(c, &Answer{Cards: make([][]byte, MaxCards+1)}, nil)
	case "large card":
		_ = Send(c, &Answer{Cards: [][]byte{make([]byte, MaxCard+1)}}, nil)
	case "nothing":
		_ = Send(c, &Answer{}, nil)
	case "class":
		_ = Send(c, &Answer{Err: &Error{Class: "fine", Remote: "other"}}, nil)
	case "text":
		_ = Send(c, &Answer{Err: &Error{Class: "refused",
			Text: strings.Repeat("no\nno\x1b", 1<<16)}}, nil)
	case "descriptors":
		_ = Send(c, &Answer{Cards: [][]byte{{1}}}, []*os.File{os.Stderr, os.Stderr})
	default:
		_ = Send(c, &Answer{Cards: [][]byte{[]byte("card")}}, nil)
	}
	_ = c.Close()
}

const fleet = "fleet"

func newTestClient(t testing.TB, how string) *Client {
	program, err := os.Executable()
	require.NoError(t, err)
	c := New(Options{Program: program, Env: []string{"EPCACHED_REMOTE_TEST_HELPER=" + how,
		"GOCOVERDIR=" + t.TempDir()}})
	c.Configure([]Config{{Name: fleet, URL: "file:///x"}})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func TestAHelperThatLiesIsBelievedNothing(t *testing.T) {
	for how, want := range map[string]error{"crash": ErrUnreachable, "crash later": ErrUnreachable,
		"hang": ErrUnreachable, "garbage": ErrUnreachable, "huge": ErrUnreachable,
		"empty": ErrUnreachable, "cut": ErrUnreachable, "endless progress": ErrUnreachable,
		"many cards": ErrDamaged, "large card": ErrDamaged, "nothing": ErrMissing,
		"class": ErrDamaged,
		"text":  ErrRefused,
		"once":  ErrUnreachable, "descriptors": nil, "good": nil} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			c := newTestClient(t, how)
			began := time.Now()
			cards, err := c.Look(t.Context(), fleet, BuildKey(portable.Hash{1}),
				500*time.Millisecond)
			require.Less(t, time.Since(began), 2*time.Second)
			require.ErrorIs(t, err, want)
			if want == nil {
				require.Len(t, cards, 1)
				return
			}
			require.Contains(t, err.Error(), "remote fleet: ")
			require.Less(t, len(err.Error()), 600)
			require.NotContains(t, err.Error(), "\n")
		})
	}
}

func TestAMissingHelperIsUnreachable(t *testing.T) {
	c := New(Options{Program: "/nonexistent/epcached-remote"})
	c.Configure([]Config{{Name: fleet, URL: "file:///x"}})
	_, err := c.Look(t.Context(), fleet, BuildKey(portable.Hash{1}), time.Second)
	require.ErrorIs(t, err, ErrUnreachable)
	require.ErrorContains(t, err, "no such file")
	_, err = c.Look(t.Context(), "other", BuildKey(portable.Hash{1}), time.Second)
	require.ErrorIs(t, err, ErrUnsupported)
	c = New(Options{Socket: "/nonexistent/socket"})
	c.Configure([]Config{{Name: fleet, URL: "file:///x"}})
	_, err = c.Look(t.Context(), fleet, BuildKey(portable.Hash{1}), time.Second)
	require.ErrorIs(t, err, ErrUnreachable)
}

func TestACrashedHelperIsStartedAgainLater(t *testing.T) {
	c := newTestClient(t, "crash later")
	now := time.Now()
	c.helper.now = func() time.Time { return now }
	look := func() error {
		_, err := c.Look(t.Context(), fleet, BuildKey(portable.Hash{1}), 5*time.Second)
		return err
	}
	require.ErrorContains(t, look(), "crashed 1 times")
	require.ErrorContains(t, look(), "it is started again in 1s")
	now = now.Add(2 * time.Second)
	require.ErrorContains(t, look(), "crashed 2 times")
}

func TestACallersContextEndsACall(t *testing.T) {
	c := newTestClient(t, "hang")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := c.Fetch(ctx, fleet, Fetch{})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Zero(t, c.Status()[0].Unreachable,
		"the caller's impatience is no failure of the remote")
}

func TestTheBreakerOpensAfterThreeFailures(t *testing.T) {
	now := time.Now()
	s := newState(Config{Name: fleet})
	s.now = func() time.Time { return now }
	down := unreachable(fleet, "no route to host")
	call := func(result error) error {
		probe, err := s.enter(false)
		if err != nil {
			return err
		}
		s.leave(probe, nil, result)
		return nil
	}
	missing := &Error{Class: "missing", Remote: fleet}
	require.NoError(t, call(down))
	require.NoError(t, call(down))
	require.NoError(t, call(missing), "a miss is health")
	for range 2 {
		require.NoError(t, call(down))
	}
	require.NoError(t, call(&Error{Class: "refused", Remote: fleet}))
	require.False(t, s.report().Open, "403 is neither health nor failure")
	require.NoError(t, call(down))
	require.True(t, s.report().Open)
	require.ErrorIs(t, call(nil), ErrUnreachable)
	for _, wait := range []time.Duration{30, 60, 120, 240, 480, 600, 600} {
		wait *= time.Second
		require.Equal(t, wait, s.report().OpenFor)
		now = now.Add(wait - 1)
		require.ErrorIs(t, call(nil), ErrUnreachable)
		now = now.Add(1)
		probe, err := s.enter(false)
		require.NoError(t, err)
		require.True(t, probe)
		require.ErrorIs(t, call(nil), ErrUnreachable, "one call probes at a time")
		s.leave(probe, nil, down)
	}
	now = now.Add(10 * time.Minute)
	require.NoError(t, call(nil))
	require.NoError(t, call(down))
	require.False(t, s.report().Open)
	status := s.report()
	require.Equal(t, int64(1), status.Refused)
	require.Len(t, status.Last, 3)
	require.Equal(t, "remote fleet: no route to host", status.Last[0].Text)
}

func TestConfigurationsThatAreWrong(t *testing.T) {
	good := Config{Name: fleet, URL: "s3://bucket/p", Endpoint: "http://127.0.0.1:1", Region: "r"}
	require.NoError(t, good.Check())
	require.NoError(t, Config{Name: "a", URL: "file:///mnt"}.Check())
	require.NoError(t, Config{Name: "a", URL: "https://h/p"}.Check())
	require.NoError(t, Config{Name: "a", URL: "oci://h:5000/a-b/c.d__e"}.Check())
	require.NoError(t, Config{Name: "a", URL: "oci://h/a", Endpoint: "http://h:5000"}.Check())
	for text, change := range map[string]func(*Config){
		"letters":      func(c *Config) { c.Name = "../x" },
		"credentials":  func(c *Config) { c.URL = "s3://user:secret@bucket" },
		"not of s3":    func(c *Config) { c.URL = "http://host" },
		"bucket":       func(c *Config) { c.URL = "s3:///x" },
		"absolute":     func(c *Config) { *c = Config{Name: "a", URL: "file://relative/x"} },
		"endpoint":     func(c *Config) { c.Endpoint = "127.0.0.1" },
		"below 0":      func(c *Config) { c.Rate = -1 },
		"only s3":      func(c *Config) { c.URL = "https://host" },
		"has a region": func(c *Config) { c.URL = "oci://host/a" },
		"REPOSITORY":   func(c *Config) { c.URL = "oci://host/A" },
		"oci://HOST":   func(c *Config) { c.URL = "oci://host/" },
	} {
		c := good
		change(&c)
		err := c.Check()
		require.ErrorContains(t, err, text)
		require.NotContains(t, err.Error(), "secret")
	}
}

func TestConfigureKeepsWhatIsKnownOfARemote(t *testing.T) {
	c := New(Options{Program: "/nonexistent/epcached-remote"})
	a, b := Config{Name: "a", URL: "file:///a"}, Config{Name: "b", URL: "file:///b"}
	c.Configure([]Config{a, b})
	for _, name := range []string{"a", "b"} {
		_, err := c.Hello(t.Context(), name)
		require.Error(t, err)
	}
	b.URL = "file:///c"
	c.Configure([]Config{b, a})
	status := c.Status()
	require.Equal(t, []string{"b", "a"}, []string{status[0].Name, status[1].Name})
	require.Equal(t, []int64{0, 1}, []int64{status[0].Unreachable, status[1].Unreachable})
}

// pair returns two ends of a connection.
func pair(t testing.TB) (a, b *net.UnixConn) {
	a, f, err := Pair()
	require.NoError(t, err)
	c, err := net.FileConn(f)
	require.NoError(t, errors.Join(err, f.Close()))
	t.Cleanup(func() { _, _ = a.Close(), c.Close() })
	return a, c.(*net.UnixConn)
}

func TestFramesCarryDescriptors(t *testing.T) {
	a, b := pair(t)
	f, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer f.Close()
	files := make([]*os.File, maxFiles)
	for i := range files {
		files[i] = f
	}
	long := Request{Card: make([]byte, 1<<20), Do: DoFetch}
	sent := make(chan error, 1)
	go func() { sent <- Send(a, &long, files) }()
	var got Request
	received, err := Receive(b, &got)
	defer CloseAll(received)
	require.NoError(t, err)
	require.NoError(t, <-sent)
	require.Equal(t, long, got)
	require.Len(t, received, maxFiles)
	require.Error(t, Send(a, &long, append(files, f)))
	require.Error(t, Send(a, strings.Repeat("x", maxFrame), nil))
	require.NoError(t, a.Close())
	_, err = Receive(b, &got)
	require.ErrorIs(t, err, io.EOF)
}

func FuzzReceive(f *testing.F) {
	f.Add([]byte("\x02\x00\x00\x00{}"))
	f.Add([]byte("\xff\xff\xff\x7f{"))
	f.Add([]byte("\x10\x00\x00\x00{\"Cards\":[\"AA\"]}"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		a, b := pair(t)
		go func() {
			_, _ = a.Write(raw)
			_ = a.Close()
		}()
		var got Answer
		files, err := Receive(b, &got)
		require.Empty(t, files)
		if err == nil {
			require.GreaterOrEqual(t, len(raw), 5)
		}
	})
}
