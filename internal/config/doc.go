// Package config reads the daemon's configuration file.
//
// The file is TOML and reading is strict: a field that is not known is an error, for a misspelled limit is no limit. Every error has file, line
// and column, and all of them are found at once. Load reads a file; Settings has the values with the defaults filled in, and Fields tells of each
// where it is from. doc/configuration.md describes the fields for those who write the file.
//
// Nothing is opened or changed on behalf of a value: whether a runtime is there, or a rule file is sound, is for those who use it.
package config
