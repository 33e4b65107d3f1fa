package modelname

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNamesThatPeopleKnowModelsBy(t *testing.T) {
	const hub = "/home/u/.cache/huggingface/hub/models--Xenova--bert-base"
	for path, want := range map[string]string{
		hub + "/snapshots/1a2b/model.onnx":           "Xenova/bert-base",
		hub + "/snapshots/1a2b/onnx/model.onnx":      "Xenova/bert-base",
		hub + "/snapshots/1a2b/onnx/model_q4.onnx":   "Xenova/bert-base/onnx/model_q4.onnx",
		hub + "/snapshots/1a2b/cpu/int4/model.onnx":  "Xenova/bert-base/cpu/int4/model.onnx",
		hub + "/blobs/9f8e":                          "Xenova/bert-base",
		"/hub/models--gpt2/snapshots/1/decoder.onnx": "gpt2/decoder.onnx",
		"/srv/models/resnet50/model.onnx":            "resnet50/model.onnx",
		"/srv/models/resnet50/1/model.onnx":          "resnet50/1/model.onnx",
		"/srv/models/bert/onnx/model.onnx":           "bert/onnx/model.onnx",
		"/1/2/3/4/5/model.onnx":                      "3/4/5/model.onnx",
		"/model.onnx":                                "model.onnx",
		"/models--":                                  "models--",
		"":                                           "sent.onnx",
	} {
		require.Equal(t, want, Of(path, "sent.onnx"), path)
	}
}

func TestModelsAreMeantByNameOrFile(t *testing.T) {
	for text, want := range map[string]bool{
		"resnet50/model.onnx": true, "model.onnx": true, "resnet50": false, "": false,
	} {
		require.Equal(t, want, Matches("resnet50/model.onnx", text), text)
	}
}
