package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSandboxSummary(t *testing.T) {
	require.Equal(t, "-", sandboxSummary(nil))
	require.Equal(t, "all in effect", sandboxSummary([]string{"files: own directory only"}))
	require.Equal(t, "not in effect: memory, user (epcachectl probe says more)",
		sandboxSummary([]string{"memory: NOT IN EFFECT: no cgroup", "files: own directory only",
			"user: NOT IN EFFECT: root"}))
}
