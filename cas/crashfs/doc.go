// Package crashfs is a file system for tests that stops or fails at any one
// step, and then shows what a power cut could have left.
//
// It passes everything on to the real file system below one directory, counts the steps that change
// it, and records the synced state: the bytes of each file at its last Sync and the names in each
// directory at its last SyncDir. Crash makes a copy of the directory in which some unsynced changes
// are lost: bytes zeroed or cut off, new names missing, removed names back.
//
// Start with New, FS.StopAt and FS.Crash.
package crashfs
