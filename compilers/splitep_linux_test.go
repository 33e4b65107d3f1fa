//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/stretchr/testify/require"
)

// splitTestEP installs the test EP as vendors do whose Python package preloads libraries: three
// libraries without a run path, under file names that are not their SONAMEs.
func splitTestEP(t *testing.T) compilers.Runtime {
	dir := compilertest.TestEPRuntime(t, newestORT, compilertest.Release{}).Directory
	out, err := exec.Command("../testdata/ep/testep/build", dir, "split").CombinedOutput()
	require.NoError(t, err, "%s", out)
	r, err := compilers.Find(dir)
	require.NoError(t, err)
	return r
}

// The worker loads the libraries that a plugin needs and that lie beside it, and the plugin opens
// them by name.
func TestLibrariesBesideAPluginAreLoaded(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{})
	r := splitTestEP(t)
	facts, err := c.Probe(t.Context(), r)
	require.NoError(t, err)
	require.Empty(t, facts.EPs[0].Error)
	require.NotEmpty(t, facts.EPs[0].Devices)
	suite(t, subject{Compiler: c, Runtime: r, EP: testEP(nil), NoNodesModel: negation(),
		Verdict: compilers.Optimal, Loads: true, GroupsLoad: true})
}

// A library that lies nowhere is named.
func TestMissingLibraryOfAPluginIsNamed(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{})
	r := splitTestEP(t)
	base := filepath.Join(r.Directory, "libepcachedtest_base.so.1.0.2")
	require.NoError(t, os.Remove(base))
	r, err := compilers.Find(r.Directory)
	require.NoError(t, err)
	facts, err := c.Probe(t.Context(), r)
	require.NoError(t, err)
	require.Contains(t, facts.EPs[0].Error, "libepcachedtest_base.so.1")
}
