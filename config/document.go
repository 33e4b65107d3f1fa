package config

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

// maxSize bounds a configuration file; what is larger is another file by mistake.
const maxSize = 1 << 20

// Position is a place in a file, from 1.
type Position struct{ Line, Column int }

// document is a file's content: values by name, and where each one stands. The decoder of values knows no places and the parser of places makes no
// values, hence both.
type document struct {
	file   string
	folder string // of the file, absolute
	values map[string]any
	places map[string]Position // by place()
	errs   Errors
}

// place is the key of a value's position. Elements of arrays are numbers from 0.
func place(path []string) string { return strings.Join(path, "\x00") }

// readDocument reads a file; "" is an empty one. The error is an Errors where the content is what is wrong.
func readDocument(file string) (*document, error) {
	if file == "" {
		return parseDocument("", nil)
	}
	// A named pipe that nothing writes to is an empty file, because to wait for it would be for ever.
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, plain(err))
	}
	defer f.Close() // only read from
	text, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, plain(err))
	}
	if len(text) > maxSize {
		return nil, fmt.Errorf("%s: larger than %d bytes", file, maxSize)
	}
	return parseDocument(file, text)
}

// plain leaves the path out: the message names it already.
func plain(err error) error {
	var path *os.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}

func parseDocument(file string, text []byte) (*document, error) {
	d := &document{file: file, values: map[string]any{}, places: map[string]Position{}}
	err := toml.Unmarshal(text, &d.values)
	var wrong *toml.DecodeError
	switch {
	case errors.As(err, &wrong):
		line, column := wrong.Position()
		cause := strings.TrimPrefix(wrong.Error(), "toml: ")
		return nil, Errors{{File: file, Position: Position{line, column}, Field: strings.Join(wrong.Key(), "."), Text: cause}}
	case err != nil:
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	d.locate(text)
	abs, err := filepath.Abs(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	d.folder = filepath.Dir(abs)
	return d, nil
}

func (d *document) absolute(path string) string {
	if path == "" || filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(d.folder, path)
}

// locator walks over the parser's expressions.
type locator struct {
	parser unstable.Parser
	starts []int // offset of each line
	places map[string]Position
	last   map[string]int // array of tables -> index of the table that is open
}

func (d *document) locate(text []byte) {
	l := &locator{starts: []int{0}, places: d.places, last: map[string]int{}}
	for i, b := range text {
		if b == '\n' {
			l.starts = append(l.starts, i+1)
		}
	}
	l.parser.Reset(text)
	var prefix []string
	for l.parser.NextExpression() {
		e := l.parser.Expression()
		switch e.Kind {
		case unstable.Table:
			prefix = l.keys(nil, e)
		case unstable.ArrayTable:
			prefix = l.keys(nil, e)
			index := 0
			if i, again := l.last[place(prefix)]; again {
				index = i + 1
			}
			l.last[place(prefix)] = index
			at := l.places[place(prefix)]
			prefix = append(prefix, strconv.Itoa(index))
			l.places[place(prefix)] = at
		case unstable.KeyValue:
			l.value(l.keys(prefix, e), e.Value())
		}
	}
}

// keys gives the path of an expression inside its table, with the index of the table where it leads through an array of them, and notes where it
// stands.
func (l *locator) keys(prefix []string, e *unstable.Node) []string {
	path := slices.Clone(prefix)
	it := e.Key()
	for it.Next() {
		if i, array := l.last[place(path)]; array && len(path) > len(prefix) {
			path = append(path, strconv.Itoa(i))
		}
		path = append(path, string(it.Node().Data))
		l.places[place(path)] = l.position(it.Node())
	}
	return path
}

// value notes where the elements of arrays and of tables in a line stand.
func (l *locator) value(path []string, v *unstable.Node) {
	it := v.Children()
	switch v.Kind {
	case unstable.Array:
		for i := 0; it.Next(); i++ {
			inner := append(slices.Clone(path), strconv.Itoa(i))
			l.places[place(inner)] = l.places[place(path)]
			if it.Node().Raw.Length > 0 { // arrays and tables have no range of their own
				l.places[place(inner)] = l.position(it.Node())
			}
			l.value(inner, it.Node())
		}
	case unstable.InlineTable:
		for it.Next() {
			l.value(l.keys(path, it.Node()), it.Node().Value())
		}
	}
}

func (l *locator) position(n *unstable.Node) Position {
	offset := int(n.Raw.Offset)
	line, exact := slices.BinarySearch(l.starts, offset)
	if !exact {
		line--
	}
	return Position{line + 1, offset - l.starts[line] + 1}
}
