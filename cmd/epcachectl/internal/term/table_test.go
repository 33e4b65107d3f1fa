package term

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestNamesAreShortenedInTheirMiddle(t *testing.T) {
	for _, tc := range []struct {
		name  string
		width int
		want  string
	}{
		{"resnet50/model.onnx", 19, "resnet50/model.onnx"},
		{"resnet50/model.onnx", 14, "resnet50/model"},
		{"Org/a-model-of-a-long-name-tiny/onnx/model_q4.onnx", 30,
			"Org/a-mode…-tiny/onnx/model_q4"},
		{"日本語の名前", 7, "日…名前"},
		{"abcdefghij", 5, "ab…ij"},
		{"abcdefghij", 1, "…"},
	} {
		require.Equal(t, tc.want, Middle(tc.name, tc.width))
	}
}

func TestWordsWithHyphensAreNotBroken(t *testing.T) {
	require.Equal(t, "  see what: epcachectl\n    pack --all -n",
		wrap("  see what: epcachectl pack --all -n", 30))
	require.Equal(t, "a\n  b-c\n  def\n  gh", wrap("a b-c defgh", 5))
}

func TestHowLongAgo(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0 s ago", 59 * time.Second: "59 s ago", 2 * time.Minute: "2 min ago",
		23 * time.Hour: "23 h ago", 47 * time.Hour: "1 day ago", 49 * time.Hour: "2 days ago",
	} {
		require.Equal(t, want, ago(d))
	}
}
