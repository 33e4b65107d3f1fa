package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// refusals is a daemon with one good build in its store, for requests that must be refused: each
// clearly, and without a trace.
type refusals struct {
	*epcached
	client *unixsock.Client
	good   string // a model that has been compiled
	dir    string // for the bad ones
}

func newRefusals(t *testing.T, s *site) *refusals {
	r := &refusals{epcached: s.start(t), dir: t.TempDir()}
	r.client = r.dial()
	r.good = writeModel(t, r.dir, 1)
	get(t, r.client, r.good)
	r.idle()
	return r
}

// idle waits until what the daemon does by itself, after its start, is done.
func (d *epcached) idle() {
	d.Helper()
	require.Eventually(d, func() bool {
		facts, err := unixsock.Ask[wire.ProbeReply](limited(d.TB), d.dial(), &wire.Probe{}, nil)
		return err == nil && len(facts.Runtimes) > 0 && len(keepersOf(d.pid())) == 0 &&
			len(entriesOf(d, d.state, "staging")) == 0
	}, patience, 5*time.Millisecond)
}

// refused runs one request, and requires an error of that class that says all of the words, a
// daemon that goes on, and a store as it was.
func (r *refusals) refused(t *testing.T, request *wire.Acquire, fds []*os.File,
	external unixsock.External, class error, says ...string) *unixsock.Error {
	t.Helper()
	before, pid := storeOf(t, r.state), r.status().Pid
	_, view, err := r.client.Acquire(limited(t), request, fds, external, nil)
	require.Nil(t, view)
	require.ErrorIs(t, err, class)
	for _, word := range says {
		require.ErrorContains(t, err, word)
	}
	require.Equal(t, pid, r.status().Pid)
	require.Equal(t, before, storeOf(t, r.state), "the store is unchanged")
	require.Equal(t, "hit", get(t, r.client, r.good, onMissFail).Outcome)
	var e *unixsock.Error
	require.ErrorAs(t, err, &e)
	return e
}

// file writes a file for a case, and opens it.
func (r *refusals) file(t *testing.T, name, content string) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
	return openFile(t, path)
}

func TestBytesThatAreNoModel(t *testing.T) {
	t.Parallel()
	r := newRefusals(t, newSite(t, runtimeDir(t, openVINO)))
	whole := string(compilertest.Dense(1, 16, 1))
	cases := map[string]struct {
		content string
		field   string
		offset  string
	}{
		"text": {
			"this is a text and not a model at all, whatever its name says", "", ""},
		"nothing":                 {"", "", ""},
		"zeros":                   {strings.Repeat("\x00", 4096), "", ""},
		"cut in the weights":      {whole[:len(whole)-200], "", ""},
		"cut in the first field":  {whole[:1], "", ""},
		"a length past the end":   {"\x08\x08\x3a\xff\xff\xff\x7f", "field 7", "2"},
		"another format":          {"PK\x03\x04" + strings.Repeat("x", 100), "", ""},
		"bytes behind the model":  {whole + "\xff\xff\xff", "", ""},
		"nested without end":      {nested(3000), "", ""},
		"external data elsewhere": {external("/etc/passwd", "", ""), "location", ""},
		"external data above":     {external("../weights.bin", "", ""), "location", ""},
		"external data below and above": {external("sub/../../weights.bin", "", ""), "location",
			""},
		"external data, offset no number": {external("w.bin", "east", ""), "offset", ""},
		"external data, length negative":  {external("w.bin", "0", "-4"), "length", ""},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			e := r.refused(t, forModel("bad.onnx"), []*os.File{r.file(t, "bad.onnx", c.content)},
				nil, unixsock.ErrBadModel, "bad.onnx")
			require.Contains(t, e.Facts["file"], "bad.onnx")
			offset, err := strconv.Atoi(e.Facts["offset"])
			require.NoError(t, err, "%v: %v", e, e.Facts)
			require.LessOrEqual(t, offset, len(c.content))
			require.Contains(t, e.Facts["field"], c.field) // "" where no field can be made out
			if c.offset != "" {
				require.Equal(t, c.offset, e.Facts["offset"])
			}
		})
	}
}

// nested is a model with a graph that has a node with an attribute with a graph with a node, and so
// on.
func nested(depth int) string {
	var graph []byte
	for range depth {
		attribute := protowire.AppendBytes(protowire.AppendTag(nil, 6, protowire.BytesType), graph)
		node := protowire.AppendBytes(protowire.AppendTag(nil, 5, protowire.BytesType), attribute)
		graph = protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), node)
	}
	return string(protowire.AppendBytes(protowire.AppendTag(nil, 7, protowire.BytesType), graph))
}

// external is a model with weights in another file.
func external(location, offset, length string) string {
	m := compilertest.DenseModel(1, 16, 1)
	m.Initializers[0].Location, m.Initializers[0].Offset, m.Initializers[0].Length = location,
		offset, length
	return string(m.Encode())
}

// A model of which the provider takes no node brings nothing to a cache; the error says which nodes
// they are.
func TestModelsThatNoProviderTakes(t *testing.T) {
	t.Parallel()
	r := newRefusals(t, newSite(t, runtimeDir(t, openVINO), runtimeDir(t, qnn)))
	texts := tinymodel.Model{
		Nodes: []tinymodel.Node{{Name: "lower", Op: "StringNormalizer", Inputs: []string{"x"},
			Outputs: []string{"y"}, Attributes: map[string]any{"case_change_action": "LOWER"}}},
		Inputs:  []tinymodel.Value{{Name: "x", Type: stringType, Shape: []any{3}}},
		Outputs: []tinymodel.Value{{Name: "y", Type: stringType, Shape: []any{3}}},
	}
	determinant := tinymodel.Model{
		Nodes:   []tinymodel.Node{{Op: "Det", Inputs: []string{"x"}, Outputs: []string{"y"}}},
		Inputs:  []tinymodel.Value{{Name: "x", Type: tinymodel.Float, Shape: []any{3, 3}}},
		Outputs: []tinymodel.Value{{Name: "y", Type: tinymodel.Float, Shape: []any{}}},
	}
	cases := map[string]struct {
		model tinymodel.Model
		nodes string
	}{
		"texts":       {texts, "1 node (1 StringNormalizer)"},
		"determinant": {determinant, "1 node (1 Det)"},
		"no node":     {tinymodel.Model{}, "0 nodes"},
	}
	for name, c := range cases {
		for _, ep := range []*wire.ExecutionProvider{openVINOProvider(), qnnProvider()} {
			t.Run(name+" by "+ep.Name, func(t *testing.T) {
				e := r.refused(t, forModel("bad.onnx", ep),
					[]*os.File{r.file(t, "bad.onnx", string(c.model.Encode()))}, nil,
					unixsock.ErrCompileFailed, ep.Name+" took no node", c.nodes,
					"caching has no benefit")
				require.Contains(t, e.Hint, "without epcached")
			})
		}
	}
}

const stringType = 8 // TensorProto.STRING

// An operator that ONNX Runtime does not know is refused in its own words.
func TestUnknownOperator(t *testing.T) {
	t.Parallel()
	r := newRefusals(t, newSite(t, runtimeDir(t, openVINO)))
	m := compilertest.DenseModel(1, 16, 1)
	m.Opsets = map[string]int64{"": 17, "com.example": 1}
	m.Nodes[0].Op, m.Nodes[0].Domain = "Frobnicate", "com.example"
	e := r.refused(t, forModel("bad.onnx"), []*os.File{r.file(t, "bad.onnx", string(m.Encode()))},
		nil,
		unixsock.ErrCompileFailed, "bad.onnx", "com.example:Frobnicate")
	require.NotEmpty(t, e.Facts["code"])
}

func TestDescriptorsThatAreNoModel(t *testing.T) {
	t.Parallel()
	r := newRefusals(t, newSite(t, runtimeDir(t, openVINO)))
	good := openFile(t, r.good)
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	require.NoError(t, unix.Mkfifo(fifo, 0o644))
	open := func(path string, flags int) func() (int, error) {
		return func() (int, error) { return unix.Open(path, flags|unix.O_CLOEXEC, 0) }
	}
	cases := map[string]struct {
		open func() (int, error)
		says string
	}{
		"O_PATH": {open(r.good, unix.O_PATH), "O_PATH"},
		"write only": {open(filepath.Join(dir, "new"), unix.O_WRONLY|unix.O_CREAT),
			"for writing only"},
		"a directory": {open(dir, unix.O_RDONLY), "directory"},
		"a FIFO":      {open(fifo, unix.O_RDONLY|unix.O_NONBLOCK), "FIFO"},
		"/dev/zero":   {open("/dev/zero", unix.O_RDONLY), "device"},
		"an event fd": {func() (int, error) { return unix.Eventfd(0, unix.EFD_CLOEXEC) },
			"not a regular file"},
	}
	weights := r.file(t, "model.onnx", external("w.bin", "", ""))
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			fd, err := c.open()
			require.NoError(t, err)
			f := os.NewFile(uintptr(fd), name)
			defer f.Close()
			r.refused(t, forModel("bad.onnx"), []*os.File{f}, nil, unixsock.ErrBadRequest,
				"bad.onnx", c.says)
			// The same as external data, brought along and asked for.
			request := forModel("model.onnx")
			request.Model.External = []*wire.ExternalFile{{Location: "w.bin", Fd: 1}}
			r.refused(t, request, []*os.File{weights, f}, nil, unixsock.ErrBadRequest, "w.bin",
				c.says)
			r.refused(t, forModel("model.onnx"), []*os.File{weights},
				func(int, string) (*os.File, error) { return dupFile(f) },
				unixsock.ErrBadRequest, "w.bin", c.says)
			// And as an option's file, and as a library.
			request = forModel("model.onnx")
			request.Eps[0].OptionFds = map[string]uint32{"load_config": 1}
			r.refused(t, request, []*os.File{good, f}, nil, unixsock.ErrBadRequest, "load_config",
				c.says)
		})
	}
}

// A file that has more bytes than its file system states is not copied, because a user could fill
// the disk with it. These state none; the second one has hundreds of gigabytes.
func TestFilesLargerThanStatedAreNotCopied(t *testing.T) {
	r := newRefusals(t, newSite(t, runtimeDir(t, openVINO)))
	for path, says := range map[string]string{
		"/proc/self/status":  "more than the 0 bytes",
		"/proc/self/pagemap": "invalid argument",
	} {
		r.refused(t, forModel("bad.onnx"), []*os.File{openFile(t, path)}, nil, unixsock.ErrBadModel,
			"cannot be read", says)
	}
}

func dupFile(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	return os.NewFile(uintptr(fd), f.Name()), err
}

func TestExternalDataThatIsNotThere(t *testing.T) {
	t.Parallel()
	r := newRefusals(t, newSite(t, runtimeDir(t, openVINO)))
	weights := string(tinymodel.Floats(1, 16*16))
	file := func(content string) unixsock.External {
		return func(int, string) (*os.File, error) { return dupFile(r.file(t, "w.bin", content)) }
	}
	t.Run("whole", func(t *testing.T) {
		f := r.file(t, "model.onnx", external("w.bin", "", ""))
		reply, view, err := r.client.Acquire(limited(t), forModel("model.onnx"), []*os.File{f},
			file(weights), nil)
		require.NoError(t, err, "what follows fails for its own reason")
		require.NoError(t, lease{reply, view}.wrong())
		require.NoError(t, view.Close())
	})
	cases := map[string]struct {
		model string
		open  unixsock.External
		class error
		says  []string
	}{
		"nobody opens it": {external("w.bin", "", ""), nil, unixsock.ErrBadModel,
			[]string{"w.bin"}},
		"too short": {external("w.bin", "0", "1024"), file(weights[:100]),
			unixsock.ErrBadModel, []string{"w.bin", `"w"`, "1024", "100"}},
		"empty": {external("w.bin", "0", "1024"), file(""),
			unixsock.ErrBadModel, []string{"w.bin", `"w"`, "1024"}},
		"length beyond the end": {external("w.bin", "0", "4096"), file(weights),
			unixsock.ErrBadModel, []string{"w.bin", `"w"`, "4096", "1024"}},
		"offset beyond the end": {external("w.bin", "2000", "4"), file(weights),
			unixsock.ErrBadModel, []string{"w.bin", `"w"`, "2000"}},
		"offset that overflows": {external("w.bin", "9223372036854775807", "1024"),
			file(weights), unixsock.ErrBadModel, []string{`"w"`, "9223372036854775807"}},
		"length that is not the tensor's": {external("w.bin", "0", "1000"), file(weights),
			unixsock.ErrBadModel, []string{"w.bin", `"w"`, "1024", "1000"}},
		"too short, no length": {external("w.bin", "", ""), file(weights[:1000]),
			unixsock.ErrBadModel, []string{"w.bin", `"w"`, "1024", "1000"}},
		"nothing left behind the offset": {external("w.bin", "1024", ""), file(weights),
			unixsock.ErrBadModel, []string{"w.bin", `"w"`, "1024", "has 0"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			r.refused(t, forModel("model.onnx"), []*os.File{r.file(t, "model.onnx", c.model)},
				c.open, c.class, c.says...)
		})
	}
}

func TestWrongRequests(t *testing.T) {
	t.Parallel()
	r := newRefusals(t, newSite(t, runtimeDir(t, openVINO), runtimeDir(t, qnn)))
	cases := map[string]struct {
		change func(*wire.Acquire)
		class  error
		says   []string
	}{
		"unknown provider": {
			withEPs(&wire.ExecutionProvider{Name: "WarpDriveExecutionProvider"}),
			unixsock.ErrUnavailable, []string{"WarpDriveExecutionProvider"}},
		"no provider": {withEPs(), unixsock.ErrBadRequest,
			[]string{"execution provider"}},
		"unknown option": {option("OpenVINOExecutionProvider", "no_such_option",
			"1"), unixsock.ErrBadRequest, []string{"OpenVINOExecutionProvider", "no_such_option"}},
		"option not a number": {option("QNNExecutionProvider", "soc_model", "sixty"),
			unixsock.ErrBadRequest, []string{"soc_model", "sixty"}},
		"option not JSON": {option("OpenVINOExecutionProvider", "load_config",
			"{CPU"), unixsock.ErrBadRequest, []string{"load_config"}},
		"option that the provider refuses": {option("OpenVINOExecutionProvider", "load_config",
			`{"CPU":{"NO_SUCH_PROPERTY":"1"}}`), unixsock.ErrCompileFailed,
			[]string{"NO_SUCH_PROPERTY"}},
		"library by path": {option("QNNExecutionProvider", "backend_path",
			"/tmp/evil.so"), unixsock.ErrBadRequest,
			[]string{"backend_path", "there is no library"}},
		"library that is not there": {option("QNNExecutionProvider", "backend_path",
			"libQnnWarp.so"), unixsock.ErrBadRequest, []string{"libQnnWarp.so"}},
		"option that writes": {option("OpenVINOExecutionProvider", "dump_subgraphs", "/tmp"),
			unixsock.ErrBadRequest, []string{"dump_subgraphs"}},
		"no such device": {
			withEPs(&wire.ExecutionProvider{Name: "OpenVINOExecutionProvider",
				Devices: []*wire.Device{{Type: "NPU"}}}), unixsock.ErrUnavailable,
			[]string{"NPU", "CPU"}},
		"session option": {session("session.no_such_thing", "1"),
			unixsock.ErrBadRequest, []string{"session.no_such_thing"}},
		"session option that writes": {session("ep.context_file_path", "/tmp/x.onnx"),
			unixsock.ErrNotAllowed, []string{"ep.context_file_path"}},
		"unknown runtime": {
			func(a *wire.Acquire) { a.Runtime = &wire.Runtime{Directory: "/no/such/runtime"} },
			unixsock.ErrUnavailable, []string{"/no/such/runtime"}},
		"free dimension": {
			func(a *wire.Acquire) { a.FreeDimensions = map[string]int64{"batch": 0} },
			unixsock.ErrBadRequest, []string{"batch"}},
		"not of this version": {func(a *wire.Acquire) { a.OnMiss = 77 }, unixsock.ErrVersion,
			[]string{"77"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			request := forModel(r.good)
			c.change(request)
			r.refused(t, request, []*os.File{openFile(t, r.good)}, nil, c.class, c.says...)
		})
	}
}

func option(ep, name, value string) func(*wire.Acquire) {
	return withEPs(&wire.ExecutionProvider{Name: ep, Options: map[string]string{name: value}})
}

func session(name, value string) func(*wire.Acquire) {
	return func(a *wire.Acquire) { a.SessionOptions = map[string]string{name: value} }
}
