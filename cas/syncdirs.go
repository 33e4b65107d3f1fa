package cas

import "sync"

// syncsAtOnce bounds how many folders are synced at the same time.
const syncsAtOnce = 16

// SyncDirs is SyncDir of several folders, at the same time: where names have
// changed in all of them, the first has the file system write its transaction,
// and the disk is told to flush its cache once for those that come together,
// not once for each. The errors are in the order of the paths.
func SyncDirs(fsys FS, paths []string) []error {
	errs := make([]error, len(paths))
	if len(paths) == 1 {
		errs[0] = fsys.SyncDir(paths[0])
		return errs
	}
	var all sync.WaitGroup
	places := make(chan struct{}, syncsAtOnce)
	for i, path := range paths {
		places <- struct{}{}
		all.Go(func() {
			errs[i] = fsys.SyncDir(path)
			<-places
		})
	}
	all.Wait()
	return errs
}
