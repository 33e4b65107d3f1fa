package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSandboxSummary(t *testing.T) {
	require.Equal(t, "-", sandboxSummary(nil))
	require.Equal(t, "all in force", sandboxSummary([]string{"files: own folder only"}))
	require.Equal(t, "not in force: memory, user (epcachectl probe says more)",
		sandboxSummary([]string{"memory: NOT IN FORCE: no cgroup", "files: own folder only",
			"user: NOT IN FORCE: root"}))
}
