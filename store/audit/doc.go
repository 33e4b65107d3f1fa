// Package audit checks a store against what it should be: the bytes of its blobs, its recipes,
// leftovers, and what is accounted for against what the file system says.
package audit
