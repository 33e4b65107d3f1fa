package index

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"runtime/debug"
	"strconv"
	"sync"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index/reserve"
)

// lockWait is how long Open waits for another process that has index.db open.
const lockWait = time.Second

// database is index.db.
//
// bbolt reads through a mapping. An unreadable page, or a truncated file, therefore causes a fault
// inside bbolt, which may hold its locks from then on, so that later transactions and Close would
// block forever. A database that turns out to be damaged is never used again: each later call fails
// with a *BrokenError, and a mark beside the file has the next Open make a new one from the
// manifests.
type database struct {
	fs      cas.FS
	dir     string // the state directory
	path    string
	reserve *reserve.Reserve

	// onBroken is called once when the database proves to be damaged. unmarked is the error if the
	// mark could not be written, so that the next Open may use the database again.
	onBroken func(why *BrokenError, unmarked error)

	// writing serialises writes, so that none blocks on a lock that a damaged database keeps.
	writing sync.Mutex

	mu     sync.RWMutex // guards the fields below
	handle *bbolt.DB    // nil if closed
	broken *BrokenError // nil if not known to be damaged
}

// BrokenError says that index.db turned out to be damaged while it was open. All calls of the index
// fail from then on; the next Open makes a new database from the manifests.
type BrokenError struct{ Cause error }

func (e *BrokenError) Error() string { return "index.db cannot be used: " + e.Cause.Error() }

// Unwrap returns the cause.
func (e *BrokenError) Unwrap() error { return e.Cause }

// panicError is a panic of bbolt. detail is its text, for the log.
type panicError struct{ cause, detail string }

func (e *panicError) Error() string { return e.cause }

// panicIn returns the text of bbolt's panic that caused an error, "" if none did.
func panicIn(err error) string {
	if p, is := errors.AsType[*panicError](err); is {
		return p.detail
	}
	return ""
}

// recoverFaults runs fn, and returns a fault or another panic as an error.
func recoverFaults(fn func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true)) // of this goroutine only
	defer func() {
		switch p := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }: // of package runtime
			err = &panicError{"memory fault: a page cannot be read, or the file was truncated", ""}
		default:
			err = &panicError{"its pages contradict each other", fmt.Sprint(p)}
		}
	}()
	return fn()
}

// damages reports whether err says that the database is damaged, and not that the disk is full or a
// value is refused. After an I/O error the database counts as damaged, because it is unknown which
// part of a transaction is on the disk.
func damages(err error) bool {
	return errors.As(err, new(*panicError)) || errors.As(err, new(*DamageError)) ||
		errors.Is(err, bolterrors.ErrInvalid) || errors.Is(err, bolterrors.ErrVersionMismatch) ||
		errors.Is(err, bolterrors.ErrChecksum) || errors.Is(err, bolterrors.ErrInvalidMapping) ||
		errors.Is(err, syscall.EIO)
}

// read runs fn in a short read transaction. fn returns no slice of the transaction's.
func read[T any](d *database, fn func(tx *bbolt.Tx) (T, error)) (v T, err error) {
	err = d.use(func(db *bbolt.DB) error {
		return db.View(func(tx *bbolt.Tx) (err error) {
			v, err = fn(tx)
			return err
		})
	})
	return v, err
}

// write runs fn in a write transaction, durable when write returns. fn must not wait for the disk.
func (d *database) write(fn func(tx *bbolt.Tx) error) error {
	d.writing.Lock()
	defer d.writing.Unlock()
	return d.use(func(db *bbolt.DB) error { return db.Update(fn) })
}

// use calls fn with the open database. It fails if that is known to be damaged.
func (d *database) use(fn func(db *bbolt.DB) error) error {
	d.mu.RLock()
	db, broken := d.handle, d.broken
	d.mu.RUnlock()
	switch {
	case broken != nil:
		return broken
	case db == nil:
		return fmt.Errorf("index.db: %w", os.ErrClosed)
	}
	err := recoverFaults(func() error { return fn(db) })
	if damages(err) {
		return d.fail(err)
	}
	return err
}

// brokenError returns the error if the database is known to be damaged, or nil.
func (d *database) brokenError() *BrokenError {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.broken
}

// fail marks the database as damaged, in memory and durably in a file beside it.
func (d *database) fail(cause error) error {
	d.mu.Lock()
	broken, first := d.broken, d.broken == nil
	if first {
		broken = &BrokenError{cause}
		d.broken = broken
	}
	d.mu.Unlock()
	if first {
		err := d.reserve.Use(func() error { return d.putMark(cause.Error()) })
		d.onBroken(broken, err)
	}
	return broken
}

// open opens the database. If it is missing or unusable, open makes a new one and returns why.
func (d *database) open() (why string, err error) {
	why, err = d.unusable()
	if err != nil || why == "" {
		return "", err
	}
	return why, d.remake(why)
}

// unusable opens the existing database, or returns why it cannot be used.
func (d *database) unusable() (why string, err error) {
	if why = d.mark(); why != "" {
		return why, nil
	}
	info, err := os.Lstat(d.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "it was missing", nil
	case err != nil:
		return "", err
	case info.Size() == 0 || !info.Mode().IsRegular():
		return "it was empty or not a file", nil
	}
	var db *bbolt.DB
	err = recoverFaults(func() (err error) {
		if db, err = openBolt(d.path); err == nil {
			why, err = schemaProblem(db)
		}
		return err
	})
	switch {
	case errors.Is(err, bolterrors.ErrTimeout):
		return "", fmt.Errorf("index.db is in use by another process: %w", err)
	case damages(err):
		return err.Error(), nil // the handle is not closed, because that could block
	case err != nil:
		return "", err
	case why != "":
		return why, db.Close()
	}
	d.handle = db
	return "", nil
}

// schemaProblem returns why a database cannot be used though it opens.
func schemaProblem(db *bbolt.DB) (why string, err error) {
	return why, db.View(func(tx *bbolt.Tx) error {
		for _, name := range buckets {
			if tx.Bucket(name) == nil {
				why = fmt.Sprintf("it has no bucket %s", name)
				return nil
			}
		}
		v, err := get(tx, bucketMeta, []byte("schema"))
		if err != nil {
			return err
		}
		if len(v) != 4 {
			why = "it has no schema version"
		} else if got := binary.LittleEndian.Uint32(v); got != schemaVersion {
			why = fmt.Sprintf("its schema is %d, this epcached's is %d", got, schemaVersion)
		}
		return nil
	})
}

func (d *database) markPath() string { return d.path + ".damaged" }

// maxMark bounds the text in a mark.
const maxMark = 4 << 10

// putMark durably writes a file beside the database that says that it is damaged, and why.
func (d *database) putMark(why string) error {
	if err := remove(d.fs, d.markPath()); err != nil {
		return err
	}
	if err := cas.WriteFile(d.fs, d.markPath(), []byte(shorten(why, maxMark))); err != nil {
		return err
	}
	return d.fs.SyncDir(d.dir)
}

// mark returns the text that putMark wrote, "" if none.
func (d *database) mark() string {
	b, err := readFile(d.fs, d.markPath(), maxMark)
	if errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	return cmp.Or(string(b), "it was marked as damaged")
}

// remake moves the old database into the quarantine and opens a new one that knows no build. A
// crash before the mark is removed has the next start do this again; one afterwards leaves a
// database that lacks builds, which a start takes in.
func (d *database) remake(why string) error {
	err := d.reserve.Use(func() error {
		err := cas.SetAside(d.fs, d.dir, d.path, why)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return recoverFaults(d.make)
	})
	if err == nil {
		err = d.fs.SyncDir(d.dir)
	}
	if err == nil {
		err = remove(d.fs, d.markPath())
	}
	if err != nil {
		return fmt.Errorf("make index.db: %w", err)
	}
	return nil
}

// make makes a database without builds. After an error there is none. It gets its name when it is
// complete, because a crash would otherwise leave a file that the next open takes for a damaged
// one.
func (d *database) make() error {
	incomplete := d.path + ".new" // after a crash, makeDirs removes it
	db, err := openBolt(incomplete)
	if err != nil {
		return errors.Join(err, remove(d.fs, incomplete))
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		for _, name := range buckets {
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		schema := binary.LittleEndian.AppendUint32(nil, schemaVersion)
		return cmp.Or(put(tx, bucketMeta, []byte("schema"), schema), writeSpace(tx, Space{}))
	})
	if err == nil {
		err = d.fs.Rename(incomplete, d.path)
	}
	if err != nil {
		return errors.Join(err, db.Close(), d.fs.Remove(incomplete))
	}
	d.handle = db
	return nil
}

// openBolt opens or makes a database file. The large mapping is address space only. It keeps a
// growing file from being mapped again, for which bbolt would block until every reader is done, and
// every new reader behind it. The freelist stays synced, because finding it again cost 382 ms at a
// million entries.
func openBolt(path string) (*bbolt.DB, error) {
	o := &bbolt.Options{
		Timeout: lockWait, FreelistType: bbolt.FreelistMapType, NoStatistics: true,
		InitialMmapSize: initialMapping(),
	}
	db, err := bbolt.Open(path, 0o600, o)
	if errors.Is(err, syscall.ENOMEM) && o.InitialMmapSize > 0 {
		o.InitialMmapSize = 0 // because the process's address space is limited
		db, err = bbolt.Open(path, 0o600, o)
	}
	return db, err
}

func initialMapping() int {
	if strconv.IntSize < 64 {
		return 0
	}
	return math.MaxInt & (64 << 30) // the mask is for 32 bits, where the constant would not fit
}

// close closes the database, unless it is damaged: then Close could block.
func (d *database) close() error {
	d.writing.Lock()
	defer d.writing.Unlock()
	d.mu.Lock()
	db := d.handle
	if d.handle = nil; d.broken != nil {
		db = nil
	}
	d.mu.Unlock()
	if db == nil {
		return nil
	}
	return recoverFaults(db.Close)
}
