package compilers

import "context"

// Find reads the runtime that stands in dir: a folder of `pip install --target`, a virtual environment, or a plain folder of libraries.
func Find(dir string) (Runtime, error) { return Runtime{}, errUnfinished }

// FindAll looks in well-known places and Python environments for runtimes that hold at least one EP library.
func FindAll(ctx context.Context) []Runtime { return nil }
