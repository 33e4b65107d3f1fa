package cache

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/queue"
)

// standbys keep one worker ready for a while after each compile that somebody waited for: whoever compiles one model soon compiles the next, with
// the same libraries. It saves that one the time in which a worker loads them. It is the latest one's; another takes its place when there
// is a compile with other libraries. It goes when it is not needed for a while, when the runtime's files change, and when its memory
// is wanted for a job.
type standbys struct {
	mu     sync.Mutex // taken before the queue's
	one    *standby   // nil: none; guarded by mu
	closed bool       // guarded by mu
}

// standby is a worker that waits for a job, in the folder that is to be the job's. Folder, worker and until are there once it has
// started, and guarded by standbys.mu before: nobody waits for that.
type standby struct {
	rc       *runtimeContent
	eps      []compilers.EP
	folder   string
	worker   *compilers.Standby // nil: it has not started yet
	until    *time.Timer
	taken    chan struct{} // closed when it is a job's; folder and worker are that job's then
	unwanted chan struct{} // closed when it is to go
	drop     func()        // closes unwanted
}

// copiedFor is the size, in bytes, of models that are copied for the sake of a worker that stands by: it cannot be let to a file that was
// not known when it started. Copying a larger one takes longer than starting a worker that reads the original.
const copiedFor = 32 << 20

// standbyMemory is what a worker with nothing to do is taken to hold, in bytes.
const standbyMemory = queue.LeastMemory

// standBy starts a worker for the next job of this one's kind, unless there is one. The job must still be under way, so that Close waits for it.
func (c *Cache) standBy(j *job) {
	able, ok := c.compiler.(compilers.Standing)
	if !ok || c.options.Standby <= 0 || waits(j.urgent) || c.ctx.Err() != nil || j.byTool() {
		return
	}
	rc, eps := j.rc, j.plan.eps
	c.work.Go(func() {
		s, err := c.standbys.start(c, able, rc, eps)
		if err != nil && !errors.Is(err, errors.ErrUnsupported) {
			c.log.Debug("no worker stands by", "error", err)
		}
		if s != nil {
			c.standbys.keep(c, s)
		}
	})
}

// byTool tells whether a vendor's own compiler makes what the job is about.
func (j *job) byTool() bool {
	return slices.ContainsFunc(j.plan.eps, func(ep compilers.EP) bool {
		lib, _ := j.rc.library(ep.Name)
		return lib.Tool != ""
	})
}

// start gives nil where there is a worker of the kind already, which is kept longer, or no memory for one. One that is replaced or
// dismissed while it starts is given all the same, for keep to end it.
func (ss *standbys) start(c *Cache, able compilers.Standing, rc *runtimeContent, eps []compilers.EP) (*standby, error) {
	s := ss.announce(c, rc, eps)
	if s == nil {
		return nil, nil
	}
	folder, worker, err := s.begin(c, able)
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if err != nil {
		ss.forget(c, s)
		return nil, err
	}
	s.folder, s.worker, s.until = folder, worker, time.NewTimer(c.options.Standby)
	return s, nil
}

// announce makes the place of the one for a worker that is to be started, nil where none is.
func (ss *standbys) announce(c *Cache, rc *runtimeContent, eps []compilers.EP) *standby {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if old := ss.one; old != nil {
		if old.suits(rc, eps) && !old.leaving() {
			if old.until != nil {
				old.until.Reset(c.options.Standby)
			}
			return nil
		}
		ss.one = nil
		old.drop()
	}
	if ss.closed || !rc.unchanged() {
		return nil
	}
	s := &standby{rc: rc, eps: eps, taken: make(chan struct{}), unwanted: make(chan struct{})}
	s.drop = sync.OnceFunc(func() { close(s.unwanted) })
	if !c.flights.queue.SetAside(standbyMemory, s.drop) {
		return nil
	}
	ss.one = s
	return s
}

// forget takes the worker from the place of the one, if it has that. The caller holds mu.
func (ss *standbys) forget(c *Cache, s *standby) {
	if ss.one == s {
		ss.one = nil
		c.flights.queue.SetAside(0, nil)
	}
}

// begin makes the folder and starts the worker.
func (s *standby) begin(c *Cache, able compilers.Standing) (folder string, worker *compilers.Standby, err error) {
	if err := os.MkdirAll(c.path("staging"), 0o700); err != nil { // somebody may have deleted it
		return "", nil, err
	}
	if folder, err = os.MkdirTemp(c.path("staging"), "job-"); err != nil {
		return "", nil, err
	}
	if err = layOut(folder); err == nil {
		worker, err = able.StandBy(s.rc.spec, s.eps, filepath.Join(folder, outFolder), filepath.Join(folder, modelsFolder))
	}
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(folder))
	}
	return folder, worker, nil
}

// suits tells whether the worker has the same libraries as one for these EPs would.
func (s *standby) suits(rc *runtimeContent, eps []compilers.EP) bool {
	same := func(a, b compilers.EP) bool {
		return a.Name == b.Name && a.Library == b.Library && reflect.DeepEqual(a.Devices, b.Devices)
	}
	return s.rc == rc && slices.EqualFunc(s.eps, eps, same)
}

// leaving tells whether the worker is gone or is to go.
func (s *standby) leaving() bool {
	var gone <-chan struct{} // nil: it is still to come
	if s.worker != nil {
		gone = s.worker.Gone()
	}
	select {
	case <-gone:
	case <-s.unwanted:
	default:
		return false
	}
	return true
}

// keep waits until the worker is a job's, or has ended and everything of it is gone.
func (ss *standbys) keep(c *Cache, s *standby) {
	defer s.until.Stop()
	select {
	case <-s.taken:
		return
	case <-s.unwanted:
	case <-s.until.C:
	case <-s.worker.Gone():
	case <-c.ctx.Done():
	}
	ss.mu.Lock()
	ss.forget(c, s)
	ss.mu.Unlock()
	select {
	case <-s.taken: // meanwhile
		return
	default:
	}
	s.worker.Close()
	if err := os.RemoveAll(s.folder); err != nil {
		c.log.Warn("staging folder not removed", "path", s.folder, "error", err)
	}
}

// take gives the worker that stands by for a job of the kind, whose memory is that job's from here on; nil: there is none, or it has
// not started yet.
func (ss *standbys) take(c *Cache, rc *runtimeContent, eps []compilers.EP) *standby {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	s := ss.one
	if s == nil || s.worker == nil || !s.suits(rc, eps) || s.leaving() {
		return nil
	}
	ss.one = nil
	close(s.taken)
	c.flights.queue.SetAside(0, nil)
	return s
}

// takeStandby gives the worker that stands by for the job, nil where there is none or it is of no use: what nobody waits for has time.
func (j *job) takeStandby() *standby {
	if j.request.models() > 1 || waits(j.urgent) || j.facts().size > copiedFor {
		return nil
	}
	return j.c.standbys.take(j.c, j.rc, j.plan.eps)
}

// job gives what is to be the compiler's; nil: none.
func (s *standby) job() *compilers.Standby {
	if s == nil {
		return nil
	}
	return s.worker
}

// dismiss ends the worker: what it has loaded is being replaced.
func (ss *standbys) dismiss() {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.one != nil {
		ss.one.drop()
	}
}

// close ends the worker, and lets no other begin.
func (ss *standbys) close() {
	ss.mu.Lock()
	ss.closed = true
	ss.mu.Unlock()
	ss.dismiss()
}

// The folders of a job.
const (
	outFolder    = "out"   // what is compiled
	modelsFolder = "model" // what it is compiled from
)

// layOut makes the folders of a job.
func layOut(folder string) error {
	for _, name := range []string{outFolder, modelsFolder} {
		if err := os.Mkdir(filepath.Join(folder, name), 0o700); err != nil {
			return err
		}
	}
	return nil
}
