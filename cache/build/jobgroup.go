package build

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// share lists the further models of a group as the compiler gets them.
func (j *Job) share() []compilers.ShareMember {
	var out []compilers.ShareMember
	for i := 1; i < len(j.Copies); i++ {
		out = append(out, compilers.ShareMember{Model: j.Copies[i].Path, Output: j.MemberOutput(i)})
	}
	return out
}

func (j *Job) nameIn(err error) string {
	var member *compilers.MemberError
	if errors.As(err, &member) && member.Member >= 0 && member.Member < j.Request.Models() {
		return j.Request.ModelFiles(member.Member).Name
	}
	return j.Request.Name
}

// loadGraphs loads what was compiled as applications will: a group in order in one process, with
// the options that make its members share.
func (j *Job) loadGraphs(ctx context.Context, out string, result compilers.Result, options map[string]string, ready <-chan struct{}) (compilers.CheckResult, error) {
	check := compilers.CheckJob{
		Runtime: j.Content.Spec, EPs: j.Plan.EPs, Graph: filepath.Join(out, result.Graph),
		SessionOptions:         options, // and no dimensions: they are fixed in the graph, and clients are told of none
		GraphOptimizationLevel: request.LoadLevel(j.Plan.Canonical.GraphOptimizationLevel),
		Pace:                   compilers.Pace{Ready: ready, Idle: j.urgent},
		Beside:                 j.Plan.OnlyProcessors,
	}
	for i := 1; i < j.Request.Models(); i++ {
		check.Share = append(check.Share, filepath.Join(out, result.Graphs[i]))
	}
	checked, err := j.checkTwice(ctx, check)
	if err != nil {
		err = request.WorkerError(err, "model %q: load check", j.nameIn(err))
	}
	return checked, err
}

// checkAlone finds out whether the members of a group also load without sharing, as one that is
// asked for alone is loaded. Where they do not, nobody is given one alone.
func (j *Job) checkAlone(ctx context.Context, out string, result compilers.Result, b *index.Build) error {
	if len(b.Members) == 0 || b.LoadCheck != compilers.Passed {
		return nil
	}
	checked, err := j.loadGraphs(ctx, out, result, j.SessionOptions, nil)
	if err != nil {
		return err
	}
	if checked.Outcome == compilers.Passed && checked.GraphOptimizationLevel == "disable_all" && b.GraphOptimizationLevel == "" {
		checked.Outcome, checked.Text = compilers.Failed, "only without graph optimisation"
	}
	if checked.Outcome == compilers.Passed {
		return nil
	}
	b.Warnings = append(b.Warnings, fmt.Sprintf("the models load together and not alone: %q: %s", b.Members[checked.Member].ModelName, compilers.LastWords(checked.Text)))
	for i := range b.Members {
		b.Members[i].AloneKey = index.RequestKey{}
	}
	return nil
}
