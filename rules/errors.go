package rules

import (
	"errors"
	"fmt"
)

// FormatError is a mistake in a file of rules.
type FormatError struct {
	File         string
	Line, Column int    // from 1; 0: the file as a whole
	Field        string // "ep.QNNExecutionProvider.rule[0].verdict"; empty: none
	Reason       string
}

func (e *FormatError) Error() string {
	where := e.File
	if e.Line > 0 {
		where = fmt.Sprintf("%s:%d:%d", e.File, e.Line, e.Column)
	}
	if e.Field != "" {
		where += ": " + e.Field
	}
	return where + ": " + e.Reason
}

// maxErrors bounds what one file is told: a file of another kind has a mistake in every line.
const maxErrors = 50

// mistakes collects all that is wrong with a file.
type mistakes struct {
	list []error
	more int
}

func (m *mistakes) add(e *FormatError) {
	if len(m.list) == maxErrors {
		m.more++
		return
	}
	m.list = append(m.list, e)
}

func (m *mistakes) err(file string) error {
	if m.more > 0 {
		return errors.Join(append(m.list, fmt.Errorf("%s: and %d more mistakes", file, m.more))...)
	}
	return errors.Join(m.list...)
}
