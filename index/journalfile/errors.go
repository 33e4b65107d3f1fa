package journalfile

import "fmt"

// NewerError says that a file was written by a newer epcached, in a format that this one does not
// know. The file is intact and must not be changed.
type NewerError struct {
	File    string
	Version uint32 // of the format
}

func (e *NewerError) Error() string {
	return fmt.Sprintf("%s: written by a newer epcached, in format %d; this one reads up to %d",
		e.File, e.Version, FormatVersion)
}

// DamageError says that a file or a row is damaged.
type DamageError struct {
	File   string
	Reason string
}

func (e *DamageError) Error() string { return fmt.Sprintf("%s is damaged: %s", e.File, e.Reason) }
