package memo

import (
	"encoding/binary"
	"encoding/json"
	"os"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/witness"
)

// Book keeps what is remembered over restarts. *index.Memos does.
type Book interface {
	Get(key []byte) ([]byte, bool)
	Save(key, value []byte) error
}

// Recall returns what Save kept under the key.
func Recall[T any](book Book, key string) (v T, ok bool) {
	raw, ok := book.Get([]byte(key))
	if !ok || json.Unmarshal(raw, &v) != nil {
		return *new(T), false
	}
	return v, true
}

// Save keeps a value under the key.
func Save(book Book, key string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return book.Save([]byte(key), raw)
}

// ID is the digest of everything that must be unchanged for a remembered fact about files to hold:
// the user who showed them, the file systems, and the stamps of all files.
type ID [32]byte

// FileKey returns the key of one file, and whether the times of its file system can be believed.
func FileKey(uid uint32, f *os.File) (ID, bool) {
	fsid, ok := witness.Believable(int(f.Fd()))
	if !ok {
		return ID{}, false
	}
	s, err := cas.StampOf(f)
	if err != nil {
		return ID{}, false
	}
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, 96), uint64(uid))
	return blake3.Sum256(AppendStamp(append(b, fsid[:]...), s)), true
}

// AppendStamp appends a file's stamp to what is hashed.
func AppendStamp(b []byte, s cas.Stamp) []byte {
	for _, v := range []uint64{s.Dev, s.Ino, uint64(s.Size), uint64(s.Mtime), uint64(s.Ctime)} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

// AppendText appends a text to what is hashed, behind its length.
func AppendText(b []byte, text string) []byte {
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(text))), text...)
}
