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

// ShareMember is a further model of a weight-sharing group: Model as Job.Model, and Output as
// Job.Output, another name than those of the other members.
type ShareMember = workerproto.Member

// ShareOptions returns the session config entries with which members of a group are loaded when
// there are several of them in one process. A member that is loaded alone has none of them.
func ShareOptions() map[string]string { return map[string]string{"ep.share_ep_contexts": "1"} }

// ForSharing returns the options with what weight-sharing groups are compiled with, where the
// options do not say otherwise.
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

// memberError names the model of a group that an error is of; a worker's number may be wrong.
func memberError(member, count int, err error) error {
	if err == nil || count < 2 || member < 0 || member >= count {
		return err
	}
	return &MemberError{Member: member, Err: err}
}

// shareRequest adds a group's models. None is embedded: amid a group binaries are in memory.
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

// noGraph returns why a compile in a session wrote no graph, if that is what err is: where the EPs
// take no node ONNX Runtime writes none.
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
