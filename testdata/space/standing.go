package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
)

// standing is a whole store, as the daemon has it: what applications compiled
// comes to it under claims and goes out as views. Nothing is compiled here, and
// no request has a model of its own: it has one with the inputs and outputs of the
// artefact and no nodes, which is all that a store compares an artefact with
// that came from libraries that it does not have.
//
// A put is for one model: an artefact with several graphs comes as one build for
// each, with the same binary, which is one blob for the store as well.
type standing struct {
	dir    string // the state directory
	from   string // where models and libraries of requests lie
	corpus corpus
	cache  *cache.Cache
	later  *atomic.Int64 // nanoseconds that its clock is ahead by
	builds []onebuild    // in the order of the corpus
}

// onebuild is one graph of an artefact, and what it refers to.
type onebuild struct {
	of    int // which artefact
	files []fileInfo
	model string // path of the request's model
	ep    string
	lib   string // path of what stands for the execution provider's library
}

// ortVersion is stated for all: no library is loaded.
const ortVersion = "1.30.0"

var self = request.Peer{UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), PID: int32(os.Getpid())}

// openStanding opens the store below dir, and writes what its requests need.
func openStanding(c corpus, dir string, later *atomic.Int64, o cache.Options) (*standing, error) {
	s := &standing{dir: filepath.Join(dir, "state"),
		from: filepath.Join(filepath.Dir(dir), "requests"), corpus: c, later: later}
	if err := os.MkdirAll(s.from, 0o755); err != nil {
		return nil, err
	}
	for i, a := range c.Artefacts {
		if err := s.prepare(i, a); err != nil {
			return nil, fmt.Errorf("%s: %w", a.Name, err)
		}
	}
	o.Now = func() time.Time { return time.Now().Add(time.Duration(later.Load())) }
	var err error
	s.cache, err = cache.Open(s.dir, o)
	return s, err
}

// prepare writes a model for each graph of the artefact.
func (s *standing) prepare(i int, a artefact) error {
	var graphs, rest []fileInfo
	for _, f := range a.Files {
		if strings.HasSuffix(f.Path, "_ctx.onnx") {
			graphs = append(graphs, f)
		} else {
			rest = append(rest, f)
		}
	}
	ep, _, _ := strings.Cut(strings.TrimPrefix(a.Name, "older-"), "-")
	one := onebuild{of: i, ep: map[string]string{"qnn": "QNNExecutionProvider",
		"openvino": "OpenVINOExecutionProvider"}[ep]}
	one.lib = filepath.Join(s.from, "lib"+a.Compiler+".so")
	if _, err := os.Stat(one.lib); err != nil { // the very file is part of the key
		if err := os.WriteFile(one.lib, []byte(a.Compiler), 0o644); err != nil {
			return err
		}
	}
	for _, g := range graphs {
		b, err := os.ReadFile(s.corpus.path(g))
		if err != nil {
			return err
		}
		one.files = append([]fileInfo{g}, rest...)
		one.model = filepath.Join(s.from,
			strings.TrimSuffix(filepath.Base(g.Path), "_ctx.onnx")+".onnx")
		if b, err = signatureOnly(b, g.Path); err != nil {
			return err
		}
		if err := os.WriteFile(one.model, b, 0o644); err != nil {
			return err
		}
		s.builds = append(s.builds, one)
	}
	return nil
}

// signatureOnly returns a model with the inputs and outputs of another and no nodes.
// name tells it from others that have the same: a fine-tune's, for one.
func signatureOnly(model []byte, name string) ([]byte, error) {
	const modelGraph, graphNode, graphName, graphInitializer = 7, 1, 2, 5
	graph, err := fields(model, func(n protowire.Number) bool { return n == modelGraph })
	if err != nil {
		return nil, err
	}
	_, _, n := protowire.ConsumeTag(graph)
	graph, _ = protowire.ConsumeBytes(graph[n:])
	graph, err = fields(graph, func(n protowire.Number) bool {
		return n != graphNode && n != graphName && n != graphInitializer
	})
	if err != nil {
		return nil, err
	}
	graph = protowire.AppendString(protowire.AppendTag(graph, graphName, protowire.BytesType), name)
	rest, err := fields(model, func(n protowire.Number) bool { return n != modelGraph })
	return protowire.AppendBytes(protowire.AppendTag(rest, modelGraph, protowire.BytesType), graph),
		err
}

// fields returns those of a message that are wanted.
func fields(b []byte, want func(protowire.Number) bool) (out []byte, err error) {
	for len(b) > 0 {
		number, _, n := protowire.ConsumeField(b)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		if want(number) {
			out = append(out, b[:n]...)
		}
		b = b[n:]
	}
	return out, nil
}

// put does what an application does that has compiled the artefact.
func (s *standing) put(one onebuild) error {
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	a, err := s.ask(ctx, one, request.ForClaim)
	if err != nil {
		return err
	}
	if a.Claim == nil {
		return fmt.Errorf("%s where a claim was asked for: %s", a.Outcome, a.Why)
	}
	put := &claims.Put{Claim: a.Claim.ID, ORTVersion: ortVersion, CompileSeconds: 10}
	for i, info := range one.files {
		f, err := os.Open(s.corpus.path(info))
		if err != nil {
			return err
		}
		defer f.Close()
		name := filepath.Base(info.Path)
		if i == 0 {
			name = a.Claim.Output
		}
		put.Files = append(put.Files, claims.PutFile{Name: name, File: f})
	}
	a, err = s.cache.Claims.Put(ctx, self, put, nil)
	if err != nil {
		return err
	}
	return a.View.Close()
}

// ask is one request, by a client that holds the view that it gets.
func (s *standing) ask(ctx context.Context, one onebuild,
	miss request.OnMiss) (*request.Answer, error) {
	model, err := os.Open(one.model)
	if err != nil {
		return nil, err
	}
	defer model.Close()
	lib, err := os.Open(one.lib)
	if err != nil {
		return nil, err
	}
	defer lib.Close()
	return s.cache.Acquire(ctx, &request.Request{Peer: self, Name: filepath.Base(one.model),
		Graph: model, CompileTerms: identity.CompileTerms{EPs: []identity.EP{{Name: one.ep}}},
		OnMiss: miss, Connection: ctx, KeepsView: true,
		Runtime: runtimes.Ref{ORTVersion: ortVersion,
			EPLibraries: []runtimes.LibraryRef{{EP: one.ep, Path: one.lib, File: lib}}}}, nil)
}

// served asks for a build, and has use look at its files while the view is held: path gives that of
// a file of the corpus.
func (s *standing) served(one onebuild, use func(path func(fileInfo) string) error) error {
	a, err := s.ask(context.Background(), one, request.Fail)
	if err != nil {
		return err
	}
	graph := filepath.Join(a.Path, a.Graph)
	err = use(func(f fileInfo) string {
		if f == one.files[0] {
			return graph
		}
		return filepath.Join(filepath.Dir(graph), filepath.Base(f.Path))
	})
	return errors.Join(err, a.View.Close())
}

// forward moves the store's clock.
func (s *standing) forward(d time.Duration) { s.later.Add(int64(d)) }

func (s *standing) artefact(i int) []onebuild {
	return slices.DeleteFunc(slices.Clone(s.builds), func(one onebuild) bool { return one.of != i })
}

// onDisk returns what all that lies below dir takes, in whole blocks, each file once whatever names
// it has.
func onDisk(dir string) (bytes int64, err error) {
	type file struct{ dev, ino uint64 }
	seen := make(map[file]bool)
	err = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it has just gone
		}
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return nil //nolint:nilerr // likewise
		}
		st := info.Sys().(*syscall.Stat_t)
		if one := (file{st.Dev, st.Ino}); !seen[one] {
			seen[one] = true
			bytes += 512 * st.Blocks
		}
		return nil
	})
	return bytes, err
}
