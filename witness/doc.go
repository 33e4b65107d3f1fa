// Package witness tells whether files were written to while they were read, and whether they may have been since.
//
// A model belongs to an application, which may write to it at any time, by descriptor or through a
// mapping. A stamp (size, times, inode) shows that on file systems whose times can be believed, once
// dirty pages were written back, and for files that were left alone for a while before.
//
// Files are for one goroutine. Start reading at Watch.
package witness
