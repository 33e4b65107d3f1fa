// Package views makes the folders from which applications load builds, knows who holds them, and takes them away.
//
// A view's files are links to blobs, or to their unpacked forms, under the names that the build has for them; a file system that has no links gets copies. Its id
// is random and never used again. Who is given a view holds a lease on it, which is a shared lock on a descriptor of its folder: it survives the daemon
// and ends with the last holder. Who was only told the path has some time. A view that is taken out of use is given to nobody new, and goes with its
// last holder; what is left of earlier runs is found at the start.
//
// A Store may be used by any number of goroutines. It decides nothing about builds: whether one may be served, evicted or packed is for who asks here
// whether somebody holds it. Start reading at View.
package views
