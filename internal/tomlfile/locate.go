package tomlfile

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/pelletier/go-toml/v2/unstable"
)

// locator finds the positions of keys and values in the parser's expressions.
type locator struct {
	*Document
	starts []int          // offset of each line
	last   map[string]int // by path of an array of tables: the index of its last table
}

// locate sets a document's positions. It ignores invalid TOML, because the decoder has better
// messages.
func locate(d *Document, text []byte) *Error {
	l := &locator{d, []int{0}, map[string]int{}}
	for i, b := range text {
		if b == '\n' {
			l.starts = append(l.starts, i+1)
		}
	}
	var parser unstable.Parser
	parser.Reset(text)
	var prefix []string
	for parser.NextExpression() {
		var wrong *Error
		switch e := parser.Expression(); e.Kind {
		case unstable.Table:
			prefix, _, wrong = l.keys(nil, e)
		case unstable.ArrayTable:
			var at Position
			prefix, at, wrong = l.keys(nil, e)
			index, again := l.last[pathKey(prefix)]
			if again {
				index++
			}
			l.last[pathKey(prefix)] = index
			prefix = append(prefix, strconv.Itoa(index))
			l.positions[pathKey(prefix)] = at
		case unstable.KeyValue:
			wrong = l.keyValue(prefix, e)
		}
		if wrong == nil && len(l.positions) > maxValues {
			wrong = l.wrong(Position{}, tooMany, maxValues)
		}
		if wrong != nil {
			return wrong
		}
	}
	return nil
}

func (l *locator) keyValue(prefix []string, e *unstable.Node) *Error {
	path, _, wrong := l.keys(prefix, e)
	if wrong != nil {
		return wrong
	}
	return l.value(path, e.Value())
}

// keys returns the path of an expression inside its table, and the position of its last key, which
// it also records. A name of an array of tables leads to its last table.
func (l *locator) keys(prefix []string, e *unstable.Node) (path []string, at Position,
	wrong *Error) {
	path = slices.Clone(prefix)
	for it := e.Key(); it.Next(); {
		if i, array := l.last[pathKey(path)]; array && len(path) > len(prefix) {
			path = append(path, strconv.Itoa(i))
		}
		path = append(path, string(it.Node().Data))
		if at = l.position(it.Node()); len(path) > maxDepth {
			return nil, at, l.wrong(at, tooDeep, maxDepth)
		}
		if _, again := l.positions[pathKey(path)]; !again { // otherwise the table was opened before
			l.positions[pathKey(path)] = at
		}
	}
	return path, at, nil
}

// value records the positions of the elements of arrays and inline tables.
func (l *locator) value(path []string, v *unstable.Node) *Error {
	if v.Kind != unstable.Array && v.Kind != unstable.InlineTable {
		return nil
	}
	if len(path) >= maxDepth {
		return l.wrong(l.positions[pathKey(path)], tooDeep, maxDepth)
	}
	index := 0
	for it := v.Children(); it.Next(); {
		child := it.Node()
		if child.Kind == unstable.Comment {
			continue
		}
		if v.Kind == unstable.InlineTable {
			if wrong := l.keyValue(path, child); wrong != nil {
				return wrong
			}
			continue
		}
		inner := append(slices.Clone(path), strconv.Itoa(index))
		index++
		l.positions[pathKey(inner)] = l.positions[pathKey(path)]
		if child.Raw.Length > 0 { // arrays and tables have no range of their own
			l.positions[pathKey(inner)] = l.position(child)
		}
		if len(l.positions) > maxValues {
			return l.wrong(l.positions[pathKey(inner)], tooMany, maxValues)
		}
		if wrong := l.value(inner, child); wrong != nil {
			return wrong
		}
	}
	return nil
}

const (
	tooMany = "more than %d keys and values"
	tooDeep = "nested more than %d deep"
)

func (l *locator) wrong(at Position, format string, most int) *Error {
	return &Error{File: l.File, Position: at, Text: fmt.Sprintf(format, most)}
}

func (l *locator) position(n *unstable.Node) Position {
	offset := int(n.Raw.Offset)
	line, exact := slices.BinarySearch(l.starts, offset)
	if !exact {
		line--
	}
	return Position{line + 1, offset - l.starts[line] + 1}
}
