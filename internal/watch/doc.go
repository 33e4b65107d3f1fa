// Package watch notices that the files of named subjects have changed: a
// runtime's libraries, a driver's version file, the configuration.
//
// A subject is a list of paths. Everything on the way of a path belongs to it: each directory from
// the root down, each symbolic link and what it leads to. So a change is noticed however it is
// made: written in place, replaced by rename, deleted, by a link that is switched or a parent that
// is moved away. Of the entries of those directories only the ones on the way count; of a directory
// that a path names itself, all its entries do, though not what lies in directories below it.
// Missing paths are watched for.
//
// The promises. Changes after Set has returned are noticed, because the watch is in place by then.
// The first sign of a change is reported as Changing; when there has been no sign for the quiet
// period, and the files' stamps were twice the same meanwhile, Settled follows once. A change that
// never comes to rest never settles. Between the two, a subject's files are no consistent version,
// because a package manager may be replacing them.
//
// Watching is a fast path and no proof. The kernel does not report stores through a mapping, writes
// through another hard link, and mounts over a directory. For these, stamps are compared every
// Backstop, as far as they move a stamp at all. Callers that depend on a file compare its stamp
// themselves.
//
// Directories that cannot be watched (limits reached, network file systems, /sys and /proc) are
// polled by stamps, Mode says why, and watching is tried again with every poll. With nothing to
// poll the package wakes every Backstop; with no subjects, never.
//
// All methods of a Watcher may be called at the same time. Start with New and Watcher.Set; watch.go
// is the life of a subject, snapshot.go what belongs to it, directories.go what fsnotify is asked.
package watch
