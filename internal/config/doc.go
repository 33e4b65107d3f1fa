// Package config reads the daemon's configuration file.
//
// The file is TOML and reading is strict: an unknown field is an error, because a misspelled limit
// is no limit. All errors are found at once, with file, line and column. Load reads a file;
// Settings has the values including defaults, and Fields returns the origin of each.
// doc/configuration.md describes the fields.
//
// The package opens nothing that a value names: its users check runtimes and rule files.
package config
