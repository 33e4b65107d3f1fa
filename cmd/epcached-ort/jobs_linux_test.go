//go:build linux && (amd64 || arm64)

package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWorkersDoNotSpinUnlessAsked(t *testing.T) {
	asked := map[string]string{"ep.context_enable": "1"}
	require.Equal(t, map[string]string{"ep.context_enable": "1", spinningOptions: "0"},
		entries(asked))
	require.Len(t, asked, 1, "the request stays as it is")
	require.Equal(t, map[string]string{spinningOptions: "1"},
		entries(map[string]string{spinningOptions: "1"}))
	require.Equal(t, map[string]string{spinningOptions: "0"}, entries(nil))
}
