// Package modelname makes the names of models that users know.
package modelname

import (
	"path"
	"strings"
)

// MaxPath is the longest path of a model that a client sends, which is the system's limit.
const MaxPath = 4 << 10

// Of returns the name of the model at a path. In the cache of a model hub it is the model's id,
// with the file if the model has several; elsewhere the last directory and the file. If that
// directory has a common name, such as "onnx" or a version number, its parent is included. A model
// without a path has the name that its client sent.
func Of(file, name string) string {
	if file == "" {
		return name
	}
	parts := strings.Split(strings.Trim(path.Clean(file), "/"), "/")
	for i := len(parts) - 2; i >= 0; i-- {
		if id, is := strings.CutPrefix(parts[i], "models--"); is && id != "" {
			return inHub(strings.Replace(id, "--", "/", 1), parts[i+1:])
		}
	}
	from := max(0, len(parts)-2)
	for from > 0 && len(parts)-from < 4 && saysNothing(parts[from]) {
		from--
	}
	return strings.Join(parts[from:], "/")
}

// inHub names a file below the directory of a model: "snapshots", the revision, and the file.
func inHub(id string, below []string) string {
	if len(below) < 3 || below[0] != "snapshots" {
		return id
	}
	switch file := strings.Join(below[2:], "/"); file {
	case "model.onnx", "onnx/model.onnx":
		return id
	default:
		return id + "/" + file
	}
}

func saysNothing(dir string) bool { return dir == "onnx" || strings.Trim(dir, "0123456789") == "" }

// Matches reports whether text names the model of this name: by all of it, or
// by its last part, which is the file.
func Matches(name, text string) bool { return text == name || text == path.Base(name) }
