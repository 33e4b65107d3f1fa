package index

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"slices"

	"github.com/epcached/epcached/cas"
)

// sorter puts rows in order that come in another, in little memory however many
// there are: it deals them out to parts that are in order themselves, of which one is
// read and sorted at a time. What memory does not hold goes into a file.
type sorter struct {
	parts [256]sorterPart
	of    func(key []byte) int // the part that a key belongs to: a later one for a later key
	spill *spill
}

type sorterPart struct {
	rows  []byte // each: length of key u16, length of value u8, key, value
	spilt []span // what of them is in the file
}

type span struct {
	at int64
	n  int
}

// sortRow is a row of a part.
type sortRow struct{ key, value []byte }

// partBytes is how much of a part is kept in memory.
const partBytes = 32 << 10

// byFirstByte deals out keys whose first byte is any.
func byFirstByte(key []byte) int { return int(key[0]) }

// add takes a row. The key has at most 64 KiB, the value 255 bytes.
func (s *sorter) add(key []byte, value ...byte) error {
	p := &s.parts[s.of(key)]
	if n := 3 + len(key) + len(value); len(p.rows)+n > partBytes && len(p.rows) > 0 {
		at, err := s.spill.write(p.rows)
		if err != nil {
			return err
		}
		p.spilt = append(p.spilt, span{at, len(p.rows)})
		p.rows = p.rows[:0]
	}
	p.rows = binary.LittleEndian.AppendUint16(p.rows, uint16(len(key)))
	p.rows = append(p.rows, byte(len(value)))
	p.rows = append(append(p.rows, key...), value...)
	return nil
}

// each calls fn with the rows of each part that has some, in order. The rows are good
// until fn returns.
func (s *sorter) each(fn func(rows []sortRow) error) error {
	for i := range s.parts {
		rows, err := s.part(i)
		if err != nil {
			return err
		}
		s.parts[i] = sorterPart{}
		if len(rows) > 0 {
			err = fn(rows)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *sorter) part(i int) ([]sortRow, error) {
	p := &s.parts[i]
	total := len(p.rows)
	for _, one := range p.spilt {
		total += one.n
	}
	all := make([]byte, 0, total)
	for _, one := range p.spilt {
		at := len(all)
		all = all[:at+one.n]
		if err := s.spill.read(all[at:], one.at); err != nil {
			return nil, err
		}
	}
	all = append(all, p.rows...)
	var rows []sortRow
	for len(all) > 0 {
		key, value := int(binary.LittleEndian.Uint16(all)), int(all[2])
		rows = append(rows, sortRow{all[3 : 3+key : 3+key], all[3+key : 3+key+value : 3+key+value]})
		all = all[3+key+value:]
	}
	slices.SortFunc(rows, func(a, b sortRow) int { return bytes.Compare(a.key, b.key) })
	return rows, nil
}

// spill is the file of what memory does not hold. It is made when it is needed,
// and has no name from then on where the system allows that.
type spill struct {
	fs   cas.FS
	path string
	file *os.File
	size int64
}

func (s *spill) write(b []byte) (at int64, err error) {
	if s.file == nil {
		if s.file, err = s.fs.Create(s.path); err != nil {
			return 0, err
		}
		_ = s.fs.Remove(s.path) // else it goes at the end
	}
	at = s.size
	n, err := s.fs.WriteAt(s.file, b, at)
	s.size += int64(n)
	return at, err
}

func (s *spill) read(b []byte, at int64) error {
	_, err := s.fs.ReadAt(s.file, b, at)
	return err
}

func (s *spill) close() error {
	if s.file == nil {
		return nil
	}
	err := s.file.Close()
	if removeErr := s.fs.Remove(s.path); !errors.Is(removeErr, fs.ErrNotExist) {
		err = errors.Join(err, removeErr)
	}
	return err
}
