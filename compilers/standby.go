package compilers

import (
	"context"
	"errors"
	"path/filepath"
	"reflect"
	"slices"
	"sync"

	"github.com/epcached/epcached/compilers/dialogue"
)

// Standby is a worker that has a runtime's libraries loaded and its EPs registered, and waits for the one job that it may do. It has no model and
// computes nothing before. What it was started for says [Standing].
type Standby struct {
	req    dialogue.Request // to stand by
	folder string
	models string
	limits Limits

	ctx    context.Context // ends the process
	cancel context.CancelCauseFunc
	given  chan struct{} // closed when there is a job
	gone   chan struct{} // closed when the process has ended; answer and err are there
	answer answer
	err    error

	mu       sync.Mutex       // guards the rest
	job      dialogue.Request // once given is closed
	progress func(string)
	taken    bool
	begun    bool // the job is
}

// errNotBegun says that a job is not begun, and that another worker may do it.
var errNotBegun = errors.New("the worker that stood by is gone")

var errUnwanted = errors.New("the worker that stood by is not needed")

// Gone is closed when the worker has ended, whether it did a job or not.
func (s *Standby) Gone() <-chan struct{} { return s.gone }

// Close ends the worker, and returns when it is gone. One that has done its job is.
func (s *Standby) Close() {
	s.cancel(errUnwanted)
	<-s.gone
}

// standbyRequest is what every compile with the EPs of the runtime has in common.
func standbyRequest(r Runtime, eps []EP, models string) (dialogue.Request, error) {
	list, err := requestEPs(r, eps)
	if err != nil {
		return dialogue.Request{}, err
	}
	for i := range list {
		list[i].Options = nil
	}
	// No file of that name is ever there: it stands for the folder, which the worker may read.
	return dialogue.Request{Do: dialogue.Standby, ORTLibrary: r.ORTLibrary, EPs: list, Model: filepath.Join(models, "model"), Readable: readable(r, list)}, nil
}

// suits tells whether a worker that was started for the job would be no different.
func (s *Standby) suits(req dialogue.Request, job Job) bool {
	same := func(a, b dialogue.EP) bool {
		return a.Name == b.Name && a.Library == b.Library && reflect.DeepEqual(a.Devices, b.Devices)
	}
	return req.Do == dialogue.Compile && req.ORTLibrary == s.req.ORTLibrary && slices.EqualFunc(req.EPs, s.req.EPs, same) &&
		req.ModelFile == nil && len(req.Share) == 0 && len(req.Read) == 0 && slices.Equal(req.Readable, s.req.Readable) &&
		job.Folder == s.folder && filepath.Dir(req.Model) == s.models
}

// take makes the job this worker's. It has one in its life.
func (s *Standby) take(req dialogue.Request, progress func(string)) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken {
		return false
	}
	s.job, s.progress, s.taken = req, progress, true
	close(s.given)
	return true
}

// order is the job's request.
func (s *Standby) order() dialogue.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.job
}

// heard passes on the phases of the job, and not those before it.
func (s *Standby) heard(phase string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.taken {
		return
	}
	s.begun = s.begun || phase == dialogue.PhaseCompiling
	if s.progress != nil {
		s.progress(phase)
	}
}
