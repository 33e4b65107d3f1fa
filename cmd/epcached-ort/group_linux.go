//go:build linux && (amd64 || arm64)

package main

import (
	"slices"
	"time"

	"github.com/epcached/epcached/compilers/dialogue"
	"github.com/epcached/epcached/compilers/ort"
)

// models lists the request's models in order.
func (j *job) models() []dialogue.Member {
	return append([]dialogue.Member{{Model: j.req.Model, Output: j.req.Output}}, j.req.Share...)
}

// compileGroup compiles all models so that they share one context binary. EPs keep it in memory until the last session writes it. All sessions
// stay until the process ends: OpenVINO forgets what it would share when the first one goes.
func (j *job) compileGroup() error {
	start := time.Now()
	members := j.models()
	for i, m := range members {
		if err := j.memberPhase(dialogue.PhaseCompiling, i); err != nil {
			return err
		}
		entries := [][2]string{{"ep.share_ep_contexts", "1"}}
		if i == len(members)-1 {
			entries = append(entries, [2]string{"ep.stop_share_ep_contexts", "1"})
		}
		if err := j.compileMember(m, entries); err != nil {
			return step(err, "compile")
		}
	}
	j.result.Seconds = time.Since(start).Seconds()
	return nil
}

func (j *job) compileMember(m dialogue.Member, entries [][2]string) error {
	o, err := j.options()
	if err != nil {
		return err
	}
	defer o.Release()
	for _, entry := range entries {
		if err := o.Set(entry[0], entry[1]); err != nil {
			return err
		}
	}
	if j.req.Route != "session_options" {
		_, err = o.Compile(j.compilation(m.Model, m.Output))
		return err
	}
	_, err = j.compileInSession(o, m.Model, m.Output, false)
	return err
}

// loadGroup loads all graphs, runs them if that is asked for, and ends their sessions.
func (j *job) loadGroup() error {
	sessions, err := j.sessions()
	if err != nil {
		return err
	}
	if j.req.Zeros > 0 {
		if err := j.runOnZeros(sessions); err != nil {
			return err
		}
	}
	release(sessions)
	return nil
}

// runGroup loads all graphs, runs each, and ends their sessions.
func (j *job) runGroup() error {
	sessions, err := j.sessions()
	if err != nil {
		return err
	}
	var outputs []ort.Tensor
	for i, s := range sessions {
		if err := j.memberPhase(dialogue.PhaseRunning, i); err != nil {
			return err
		}
		more, err := j.runSession(s)
		if err != nil {
			return err
		}
		outputs = append(outputs, more...)
	}
	release(sessions)
	return j.writeOutputs(outputs)
}

// release ends sessions in reverse, as applications are told to.
func release(sessions []*ort.Session) {
	for _, s := range slices.Backward(sessions) {
		s.Release()
	}
}

// sessions loads all graphs in order.
func (j *job) sessions() ([]*ort.Session, error) {
	var sessions []*ort.Session
	start := time.Now()
	for i, m := range j.models() {
		if err := j.memberPhase(dialogue.PhaseLoading, i); err != nil {
			return nil, err
		}
		o, err := j.options()
		if err != nil {
			return nil, err
		}
		s, err := o.Open(m.Model)
		if err != nil {
			return nil, step(err, "load %q", m.Model)
		}
		sessions = append(sessions, s)
	}
	j.result.Seconds = time.Since(start).Seconds()
	return sessions, nil
}

// memberPhase tells which model of the group the work is at, so that a crash can be laid to it.
func (j *job) memberPhase(name string, member int) error {
	return j.tell(dialogue.Event{Phase: name, Member: member + 1})
}
