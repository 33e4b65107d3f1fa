package compilers_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/epmodel"
	"github.com/stretchr/testify/require"
)

// groupJob writes models into a directory of their own, to be compiled as one group.
func (s subject) groupJob(t *testing.T, models ...[]byte) compilers.Job {
	job := s.job(t, models[0])
	job.EPs = []compilers.EP{s.EP}
	job.EPs[0].Options = map[string]string{}
	for _, options := range []map[string]string{s.EP.Options, s.ShareOptions} {
		for name, value := range options {
			job.EPs[0].Options[name] = value
		}
	}
	for i, model := range models[1:] {
		name := fmt.Sprintf("0123456789abcdef_%d", i+2)
		path := filepath.Join(job.Dir, name+".onnx")
		require.NoError(t, os.WriteFile(path, model, 0o600))
		job.Share = append(job.Share,
			compilers.ShareMember{Model: path, Output: name + "_ctx.onnx"})
	}
	return job
}

// variants are three models with the same weights, which take one, two and four rows.
func variants() [][]byte {
	return [][]byte{compilertest.Dense(1, 64, 1), compilertest.Dense(1, 64, 2),
		compilertest.Dense(1, 64, 4)}
}

func (s subject) testGroup(t *testing.T) {
	job := s.groupJob(t, variants()...)
	result, err := s.Compiler.Compile(t.Context(), job, nil)
	require.NoError(t, err)
	require.Equal(t, job.Output, result.Graph)
	require.Equal(t, []string{job.Output, job.Share[0].Output, job.Share[1].Output}, result.Graphs)
	require.Len(t, result.Files, 4, "three graphs and one binary")
	require.Equal(t, result.Graphs, result.Files[:3])
	all := sizes(t, job.Dir, result.Files)
	for _, graph := range result.Graphs {
		model := read(t, filepath.Join(job.Dir, graph))
		require.Len(t, model.Contexts, 1)
		require.Equal(t, result.Files[3], model.Contexts[0].CacheContext)
		require.NoError(t, epmodel.Validate(model, all))
	}
	check, err := s.Compiler.Check(t.Context(), groupCheck(s, job, result))
	require.NoError(t, err)
	if !s.GroupsLoad {
		require.Equal(t, compilers.NotCheckable, check.Outcome, check.Text)
		return
	}
	require.Equal(t, compilers.Passed, check.Outcome, check.Text)
	for _, graph := range result.Graphs {
		alone := compilers.CheckJob{Runtime: s.Runtime, EPs: job.EPs,
			Graph: filepath.Join(job.Dir, graph)}
		check, err := s.Compiler.Check(t.Context(), alone)
		require.NoError(t, err)
		require.Equal(t, compilers.Passed, check.Outcome, "%s alone: %s", graph, check.Text)
	}
}

// groupCheck loads all members of a group in one process.
func groupCheck(s subject, job compilers.Job, result compilers.Result) compilers.CheckJob {
	check := compilers.CheckJob{Runtime: s.Runtime, EPs: job.EPs,
		Graph:   filepath.Join(job.Dir, result.Graph),
		Session: compilers.Session{SessionOptions: compilers.ShareOptions()}}
	for _, graph := range result.Graphs[1:] {
		check.Share = append(check.Share, filepath.Join(job.Dir, graph))
	}
	return check
}

func (s subject) testGroupMemberMissing(t *testing.T) {
	if !s.GroupsLoad {
		return
	}
	job := s.groupJob(t, variants()...)
	result, err := s.Compiler.Compile(t.Context(), job, nil)
	require.NoError(t, err)
	require.NoError(t, os.Remove(filepath.Join(job.Dir, result.Graphs[1])))
	check, err := s.Compiler.Check(t.Context(), groupCheck(s, job, result))
	require.NoError(t, err)
	require.Equal(t, compilers.Failed, check.Outcome)
	require.Equal(t, 1, check.Member)
	require.NotEmpty(t, check.Text)
}

func (s subject) testGroupMemberFails(t *testing.T) {
	models := variants()
	models[1] = []byte("this is not a model\xff\xff\xff")
	_, err := s.Compiler.Compile(t.Context(), s.groupJob(t, models...), nil)
	var member *compilers.MemberError
	require.ErrorAs(t, err, &member)
	require.Equal(t, 1, member.Member)
	var refused *compilers.RefusedError
	require.ErrorAs(t, err, &refused)
	require.ErrorContains(t, err, "model 2 of the group")
}

func (s subject) testGroupMemberWithoutNodes(t *testing.T) {
	if s.NoNodesModel == nil || s.NoNodesOption != nil {
		return // only where it is the model that says so
	}
	models := variants()
	models[2] = s.NoNodesModel
	_, err := s.Compiler.Compile(t.Context(), s.groupJob(t, models...), nil)
	var member *compilers.MemberError
	require.ErrorAs(t, err, &member)
	require.Equal(t, 2, member.Member)
	var none *compilers.NoNodesError
	require.ErrorAs(t, err, &none)
	require.Equal(t, []string{s.EP.Name}, none.EPs)
}
