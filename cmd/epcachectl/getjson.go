package main

import (
	"errors"
	"maps"
	"strings"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// getResult is one element of what get --json prints. The names are a contract for scripts.
type getResult struct {
	Model                string                       `json:"model"` // its path, as it was given or found
	Outcome              string                       `json:"outcome"`
	RequestKey           string                       `json:"request_key"`
	Build                string                       `json:"build"`
	ModelDigest          string                       `json:"model_digest"`
	EP                   string                       `json:"ep"`
	SDKVersion           string                       `json:"sdk_version"`
	HardwareArchitecture string                       `json:"hardware_architecture"`
	Compatibility        string                       `json:"compatibility"`
	View                 string                       `json:"view"`
	Graph                string                       `json:"graph"`
	Files                []fileResult                 `json:"files"`
	ProviderOptions      map[string]map[string]string `json:"provider_options"` // by execution provider
	SessionOptions       map[string]string            `json:"session_options"`
	CompileSeconds       float64                      `json:"compile_seconds"`
	ElapsedSeconds       float64                      `json:"elapsed_seconds"`
	Why                  string                       `json:"why"`
	Unkept               bool                         `json:"unkept,omitempty"`  // nothing of it is kept, or not yet: a warning says which; the next call compiles again unless it is kept by then
	Job                  string                       `json:"job,omitempty"`     // of "queued"
	Member               *uint32                      `json:"member,omitempty"`  // of a group: which of members it is
	Members              []memberResult               `json:"members,omitempty"` // of a group, in the order in which several are loaded in one process
	Warnings             []string                     `json:"warnings,omitempty"`
	DryRun               bool                         `json:"dry_run,omitempty"` // with -n: nothing was done
}

// memberResult is one model of a group.
type memberResult struct {
	Name           string            `json:"name"`
	ModelDigest    string            `json:"model_digest"`
	Graph          string            `json:"graph"`
	SessionOptions map[string]string `json:"session_options"` // besides those above, when several members are loaded in one process
}

type fileResult struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	Digest string `json:"digest,omitempty"` // not there: the file is not kept
}

// failedResult stands in the list for a model that failed, so that the others keep their places.
type failedResult struct {
	Model   string            `json:"model"`
	Outcome string            `json:"outcome"` // "failed", or "missing" with -n
	Class   string            `json:"class,omitempty"`
	Error   string            `json:"error,omitempty"`
	Hint    string            `json:"hint,omitempty"`
	Facts   map[string]string `json:"facts,omitempty"`
	DryRun  bool              `json:"dry_run,omitempty"` // with -n: nothing was done
}

func (r *got) json(dryRun bool) any {
	if r.missing {
		return failedResult{Model: r.path, Outcome: "missing", DryRun: dryRun}
	}
	if r.err != nil {
		f := failedResult{Model: r.path, Outcome: "failed", DryRun: dryRun, Error: r.err.Error(), Hint: strings.Join(hints(r.err), "; ")}
		var e *unixsock.Error
		if errors.As(r.err, &e) {
			f.Class, f.Facts = wire.ErrorClass_name[int32(e.Class)], e.Facts
		}
		return f
	}
	a := r.reply
	out := getResult{
		Model: r.path, Outcome: outcomeOf(a), RequestKey: a.GetRequestKey(), Build: a.GetBuild(), ModelDigest: a.GetModelDigest(), EP: a.GetEp(),
		SDKVersion: a.GetSdkVersion(), HardwareArchitecture: a.GetHardwareArchitecture(), Compatibility: a.GetCompatibility(),
		View: a.GetView(), Graph: r.graph, Files: filesOf(a.GetFiles()), CompileSeconds: a.GetCompileSeconds(),
		ElapsedSeconds: r.elapsed.Seconds(), DryRun: dryRun, Why: a.GetWhy(), Unkept: a.GetUnkept(), Warnings: a.GetWarnings(),
		ProviderOptions: make(map[string]map[string]string), SessionOptions: make(map[string]string),
	}
	for ep, options := range a.GetProviderOptions() {
		out.ProviderOptions[ep] = make(map[string]string)
		maps.Copy(out.ProviderOptions[ep], options.GetEntries())
	}
	switch {
	case r.queued():
		out.Outcome, out.Job = "queued", a.GetJob()
	case r.job != nil: // it was queued, and has ended since
		out.Outcome, out.Build, out.Job = "compiled", r.job.GetBuild(), r.job.GetId()
	}
	maps.Copy(out.SessionOptions, a.GetSessionOptions())
	r.addMembers(&out)
	if level := a.GetGraphOptimizationLevel(); level != "" {
		out.SessionOptions["graph_optimization_level"] = level
	}
	return out
}

// addMembers tells of the group that the model is one of.
func (r *got) addMembers(out *getResult) {
	members := r.reply.GetMembers()
	if len(members) == 0 {
		return
	}
	at := r.reply.GetMember()
	if len(r.group) > 0 {
		at = uint32(r.member)
	}
	out.Member, out.Members = &at, membersOf(members)
	if int(at) < len(members) {
		out.ModelDigest = members[at].GetModelDigest()
	}
}

func membersOf(members []*wire.Member) []memberResult {
	var out []memberResult
	for _, m := range members {
		out = append(out, memberResult{m.GetName(), m.GetModelDigest(), m.GetGraph(), m.GetSessionOptions()})
	}
	return out
}

func filesOf(files []*wire.File) []fileResult {
	out := make([]fileResult, len(files))
	for i, f := range files {
		out[i] = fileResult{f.GetName(), f.GetSize(), f.GetDigest()}
	}
	return out
}
