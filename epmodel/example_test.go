package epmodel_test

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/epcached/epcached/epmodel"
)

// This example lists the files that an artefact needs beside its graph, and checks that they are
// complete.
func Example() {
	f, err := os.Open("testdata/artefacts/openvino_ctx.onnx")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer f.Close()
	src, err := epmodel.FileSource(f)
	if err != nil {
		fmt.Println(err)
		return
	}
	m, err := epmodel.Read(context.Background(), "openvino_ctx.onnx", src)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, c := range m.Contexts {
		fmt.Println("made by", c.Source, c.SDKVersion)
	}
	for _, r := range m.Sidecars() {
		fmt.Println("needs", r.Name)
	}
	if err := epmodel.Validate(m, nil); err != nil {
		fmt.Println(strings.ReplaceAll(err.Error(), ": ", ":\n  "))
	}
	// Output:
	// made by OpenVINOExecutionProvider 2026.4
	// needs side_ctx_OpenVINOExecutionProvider.bin
	// openvino_ctx.onnx:
	//   offset 5:
	//   ep_cache_context:
	//   node "OpenVINOExecutionProvider_OpenVINOExecutionProvider_10291946305476075467_0_0":
	//   file "side_ctx_OpenVINOExecutionProvider.bin" is not one of the build's files
}
