package compilers

import "fmt"

// CodeNames are ONNX Runtime's error codes as its messages spell them: OrtErrorCode without ORT_, each at its number.
var CodeNames = []string{"OK", "FAIL", "INVALID_ARGUMENT", "NO_SUCHFILE", "NO_MODEL", "ENGINE_ERROR", "RUNTIME_EXCEPTION", "INVALID_PROTOBUF", "MODEL_LOADED",
	"NOT_IMPLEMENTED", "INVALID_GRAPH", "EP_FAIL", "MODEL_LOAD_CANCELED", "MODEL_REQUIRES_COMPILATION", "NOT_FOUND"}

// CodeName gives an error code with ONNX Runtime's name for it: "10 INVALID_GRAPH". Below 0 is a crash.
func CodeName(code int) string {
	switch {
	case code < 0:
		return "a crash"
	case code < len(CodeNames):
		return fmt.Sprintf("%d %s", code, CodeNames[code])
	}
	return fmt.Sprintf("code %d", code)
}
