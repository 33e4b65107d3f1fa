package doctor

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// misfits are pairs of an execution provider's and ONNX Runtime's releases that were tried and do not work.
var misfits = []struct {
	ep       string
	versions []string          // of the Python package
	broken   func([2]int) bool // by ONNX Runtime's major and minor version
	because  string
	hint     string
}{
	{
		ep: "OpenVINOExecutionProvider", versions: []string{"1.7.0", "1.8.0"},
		broken:  func(ort [2]int) bool { return !earlier(ort, [2]int{1, 31}) },
		because: "it needs a function that only earlier ONNX Runtimes have",
		hint:    "install 1.8.1 or later of it, or onnxruntime 1.24.4 to 1.28.0 beside it",
	},
	{
		ep: "QNNExecutionProvider", versions: []string{"2.3.0"},
		broken:  func(ort [2]int) bool { return ort != [2]int{1, 24} },
		because: "it was made for ONNX Runtime 1.24.4",
		hint:    "install 2.4.0 or later of it, or onnxruntime 1.24.4 beside it",
	},
}

func earlier(a, b [2]int) bool { return a[0] < b[0] || a[0] == b[0] && a[1] < b[1] }

// misfit says why an execution provider does not start with an ONNX Runtime, and what to do; "" where nothing is known against the pair.
func misfit(ep, version, ort string) (text, hint string) {
	numbers, ok := minor(ort)
	if !ok {
		return "", ""
	}
	for _, m := range misfits {
		if m.ep == ep && slices.Contains(m.versions, version) && m.broken(numbers) {
			return fmt.Sprintf("%s %s does not start with ONNX Runtime %s: %s", ep, version, ort, m.because), m.hint
		}
	}
	return "", ""
}

func minor(version string) (numbers [2]int, ok bool) {
	parts := strings.Split(version, ".")
	if len(parts) < 2 {
		return numbers, false
	}
	for i := range numbers {
		n, err := strconv.Atoi(parts[i])
		if err != nil {
			return numbers, false
		}
		numbers[i] = n
	}
	return numbers, true
}
