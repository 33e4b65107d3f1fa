package index

import "github.com/epcached/epcached/index/journalfile"

// NewerError says that a newer epcached wrote a file.
type NewerError = journalfile.NewerError

// DamageError says that a file or a row is damaged.
type DamageError = journalfile.DamageError
