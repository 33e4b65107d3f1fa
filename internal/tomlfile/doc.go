// Package tomlfile reads TOML files that people write: a configuration, a file of rules, a list of
// models. It decodes the values with go-toml, and knows the line and the column of each key and
// value, so that a message about a value can name its place long after the file was read.
package tomlfile
