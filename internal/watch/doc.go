// Package watch notices that the files of named subjects have changed: a
// runtime's libraries, a driver's version file, the configuration.
//
// A subject is a list of paths. All components of a path belong to it: each directory from the root
// down, and each symbolic link with its target. So every kind of change is noticed: a write in
// place, a rename, a deletion, a changed link, a moved parent directory. Of these directories only
// the entries on the path count. If a path itself names a directory, all its entries count, but not
// those of directories below it. Missing paths are watched until they exist.
//
// Promises: changes after the return of Set are noticed. The first sign of a change is reported as
// Changing. When there has been no sign for the quiet period, and the files' stamps were equal
// twice in that time, Settled follows once. Between the two events, a subject's files may be
// inconsistent, because a package manager may be replacing them.
//
// Watching notices most changes soon, but not all. The kernel does not report stores through a
// mapping, writes through another hard link, and mounts over a directory. To find these, stamps are
// compared every Backstop. Callers that must notice every change of a file compare its stamp
// themselves.
//
// Directories that cannot be watched (limits reached, network file systems, /sys and /proc) are
// polled by stamps, Mode says why, and watching is tried again with every poll. Without paths to
// poll the package wakes every Backstop; without subjects, never.
//
// A Watcher is safe for concurrent use. Start with New and Watcher.Set; watch.go has the states of
// a subject, snapshot.go its paths and stamps, directories.go the calls to fsnotify.
package watch
