package config

import "github.com/epcached/epcached/internal/tomlfile"

// What is wrong in a file, and where: see package tomlfile.
type (
	Position = tomlfile.Position
	Error    = tomlfile.Error
	Errors   = tomlfile.Errors
)
