package exit

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAMessageNamesTheModelOnce(t *testing.T) {
	for cause, want := range map[string]string{
		`model "a.onnx" does not compile: 11 EP_FAIL: no`: `get "dir/a.onnx": ` +
			`it does not compile: 11 EP_FAIL: no`,
		`model "a.onnx": offset 3: not an ONNX model`: `get "dir/a.onnx": ` +
			`offset 3: not an ONNX model`,
		`dir/a.onnx: offset 3: not an ONNX model`: `get "dir/a.onnx": ` +
			`offset 3: not an ONNX model`,
		`no entry "dir/a.onnx"`: `get "dir/a.onnx": no such entry`,
		`model "b.onnx" does not compile`: `get "dir/a.onnx": ` +
			`model "b.onnx" does not compile`,
		`model "a.onnx"`: `get "dir/a.onnx": model "a.onnx"`,
		`no build for model "a.onnx": never compiled`: `get "dir/a.onnx": ` +
			`no build for model "a.onnx": never compiled`,
	} {
		require.EqualError(t, WithOperation("get", "dir/a.onnx", errors.New(cause)), want)
	}
}
