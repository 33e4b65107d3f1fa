package cas

import "golang.org/x/sync/errgroup"

const syncsAtOnce = 16

// SyncDirs is SyncDir of several folders, at the same time: where names have
// changed in all of them, the first has the file system write its transaction,
// and the disk is told to flush its cache once for those that come together,
// not once for each. The errors are in the order of the paths.
func SyncDirs(fsys FS, paths []string) []error {
	errs := make([]error, len(paths))
	var all errgroup.Group
	all.SetLimit(syncsAtOnce)
	for i, path := range paths {
		all.Go(func() error {
			errs[i] = fsys.SyncDir(path)
			return nil
		})
	}
	_ = all.Wait() // always nil: each error has its own place
	return errs
}
