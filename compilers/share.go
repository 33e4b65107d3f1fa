package compilers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/epcached/epcached/compilers/workerproto"
)

// ShareMember is a model of a group after the first one. Model is like Job.Model, and Output like
// Job.Output, with a name that no other member has.
type ShareMember = workerproto.Member

// ShareOptions returns the session config entries for loading several members of a group in one
// process. A member that is loaded alone has none of them.
func ShareOptions() map[string]string { return map[string]string{"ep.share_ep_contexts": "1"} }

// ForSharing returns the options with the defaults for compiling groups.
func (i EPInfo) ForSharing(options map[string]string) map[string]string {
	full := map[string]string{}
	for name, opt := range i.Options {
		if opt.Share != "" {
			full[name] = opt.Share
		}
	}
	maps.Copy(full, options)
	return full
}

// MemberError is the failure of one model of a group, and so of the group.
type MemberError struct {
	Member int // 0: the first
	Err    error
}

func (e *MemberError) Error() string {
	return fmt.Sprintf("model %d of the group: %v", e.Member+1, e.Err)
}
func (e *MemberError) Unwrap() error { return e.Err }

// memberError wraps an error with the model of a group that caused it. A worker's number may be
// invalid.
func memberError(member, count int, err error) error {
	if err == nil || count < 2 || member < 0 || member >= count {
		return err
	}
	return &MemberError{Member: member, Err: err}
}

// shareRequest adds a group's models. It does not embed contexts, because ORT keeps the binaries in
// memory until the last member.
func shareRequest(job Job, req *workerproto.Request) error {
	if len(job.Share) == 0 {
		return nil
	}
	if job.Embed {
		return fmt.Errorf("compile %q: models that share one context binary cannot be embedded",
			job.Model)
	}
	names := map[string]bool{job.Output: true}
	for _, m := range job.Share {
		switch {
		case !filepath.IsAbs(m.Model):
			return fmt.Errorf("compile %q: paths must be absolute", m.Model)
		case m.Output == "" || m.Output != filepath.Base(m.Output) || names[m.Output]:
			return fmt.Errorf("compile %q: output %q is not a file name of its own",
				m.Model, m.Output)
		}
		names[m.Output] = true
		req.Share = append(req.Share,
			workerproto.Member{Model: m.Model, Output: filepath.Join(job.Dir, m.Output)})
	}
	return nil
}

// noGraph replaces the error for a missing graph by its cause: in a session, ONNX Runtime writes
// none if the EPs take no node.
func noGraph(ctx context.Context, job Job, err error) error {
	var missing *missingGraphError
	if !errors.As(err, &missing) {
		return err
	}
	member := slices.Index(job.Outputs(), missing.graph)
	path := job.Model
	if member > 0 {
		path = job.Share[member-1].Model
	}
	model, err2 := readGraph(ctx, path)
	if err2 != nil {
		return errors.Join(err, err2)
	}
	return memberError(member, len(job.Share)+1, &NoNodesError{OpTypes: model.OpTypes})
}

// Outputs names the job's graphs in order.
func (job Job) Outputs() []string {
	names := []string{job.Output}
	for _, m := range job.Share {
		names = append(names, m.Output)
	}
	return names
}
