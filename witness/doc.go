// Package witness tells whether files were written to while they were read, and whether they may have been since.
//
// A model belongs to an application, which may write to it at any time, by descriptor or through a mapping. Two things vouch for what was read. A stamp
// (size, times, inode) does on file systems whose times can be believed, once dirty pages were written back, and for files that were left alone for a
// while before. A Guard, a read lease of the kernel's, does for files that were just written too: it stands as long as nobody wrote.
//
// Any number of goroutines may use a Guards; Files are for one. Start reading at Watch.
package witness
