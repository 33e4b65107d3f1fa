package compilers

import (
	"path/filepath"
	"slices"

	"github.com/epcached/epcached/compilers/dialogue"
)

// privateFolder is where a worker has its working directory, home and temporary files: in the job's
// folder, and removed before output is listed.
const privateFolder = ".worker"

// Spelling returns the path by which the worker of a Job with this Folder names a model: relative
// to the worker's working directory. ONNX Runtime hashes that spelling into names of nodes and
// graphs, so two compiles of one model give the same bytes if their folders and models have the
// same names and lie in the same way to each other, wherever that is.
func Spelling(folder, model string) string {
	return relative(filepath.Join(folder, privateFolder), model)
}

func relative(workingDirectory, path string) string {
	if spelled, err := filepath.Rel(workingDirectory, path); err == nil {
		return spelled
	}
	return path // two absolute paths always have a relation, on Unix
}

// spelled returns a request to compile with its models as the worker is to spell them.
func spelled(req dialogue.Request, workingDirectory string) dialogue.Request {
	if req.Do != dialogue.Compile {
		return req
	}
	req.Model = relative(workingDirectory, req.Model)
	req.Share = slices.Clone(req.Share)
	for i := range req.Share {
		req.Share[i].Model = relative(workingDirectory, req.Share[i].Model)
	}
	return req
}
