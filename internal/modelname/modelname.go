// Package modelname gives models the names that people know them by.
package modelname

import (
	"path"
	"strings"
)

// MaxPath is how many bytes of a path a client sends at most, as long as a path may be.
const MaxPath = 4 << 10

// Of returns the name by which people know the model at a path: in a cache of a model hub the
// model's id, with the file where the model has several; elsewhere the last directory and the file.
// Directories that say nothing, such as "onnx" and the numbers of versions, are joined by the one
// above them. A model without a path has the name that its client sent.
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
