package cas

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// steps takes so many calls, and then fails after one byte.
type steps struct {
	left    int
	content []byte
}

func (s *steps) WriteAt(p []byte, off int64) (int, error) {
	if s.left == 0 {
		return 1, errors.New("full")
	}
	s.left--
	if len(p) > WriteStep || int(off) != len(s.content) {
		return 0, errors.New("not a step")
	}
	s.content = append(s.content, p...)
	return len(p), nil
}

func TestWriteInSteps(t *testing.T) {
	content := random(3*WriteStep + 5)
	s := &steps{left: 4}
	n, err := WriteInSteps(s, content, 0)
	require.NoError(t, err)
	require.Equal(t, len(content), n)
	require.Equal(t, content, s.content)

	n, err = WriteInSteps(&steps{left: 2}, content, 0)
	require.EqualError(t, err, "full")
	require.Equal(t, 2*WriteStep+1, n, "what was written is counted")
}
