package index

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/epcached/epcached/cas"
)

// How long a call into bbolt may take before its handle is given up. Reads
// take microseconds; a write waits for the disk.
const (
	readLimit  = 5 * time.Second
	writeLimit = time.Minute
	openLimit  = 2 * time.Minute
	lockWait   = time.Second // for another process that has index.db open
)

// database is index.db behind a handle that can be replaced.
//
// bbolt reads through a mapping. Where a page cannot be read, or the file has
// been cut short, that is a fault in the middle of bbolt, which then holds its
// locks for ever: even Close hangs. So every call runs in a goroutine of its
// own that turns faults into errors, and after one the handle is abandoned,
// not closed, the file set aside, and a new database filled from the manifests.
type database struct {
	fs      cas.FS
	dir     string // the state folder
	path    string
	reserve *reserve                 // of the disk
	fill    func(db *bbolt.DB) error // from manifests
	// lost is told why a database was replaced while it was in use.
	lost func(cause error)

	writing turn       // one write at a time, so that none waits inside a handle that is given up
	waits   *cas.Waits // for a Retract, here and at a folder

	making atomic.Bool  // a database is being made in the place of one that was in use
	mu     sync.RWMutex // guards handle; held for writing while a database is made
	handle *bbolt.DB    // nil: closed
}

// faultError is a panic out of bbolt, or a call that did not come back.
type faultError struct{ cause string }

func (e *faultError) Error() string { return "index.db: " + e.cause }

// guard runs fn where a fault is an error, for at most limit. fn may go on
// running after that, so it shares nothing that is written.
func guard[T any](limit time.Duration, fn func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	go func() {
		debug.SetPanicOnFault(true) // of this goroutine only
		var r result
		defer func() {
			if p := recover(); p != nil {
				r = result{err: &faultError{fmt.Sprint(p)}}
			}
			done <- r
		}()
		r.value, r.err = fn()
	}()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case r := <-done:
		return r.value, r.err
	case <-timer.C:
		return *new(T), &faultError{fmt.Sprintf("no answer within %v", limit)}
	}
}

// broken reports whether err says that the database is no good, and not the
// disk full or a value refused.
func broken(err error) bool {
	var fault *faultError
	var damage *DamageError
	return errors.As(err, &fault) || errors.As(err, &damage) ||
		errors.Is(err, bolterrors.ErrInvalid) || errors.Is(err, bolterrors.ErrVersionMismatch) ||
		errors.Is(err, bolterrors.ErrChecksum) || errors.Is(err, bolterrors.ErrInvalidMapping) ||
		errors.Is(err, syscall.EIO)
}

// read runs fn in a short read transaction. What it returns is its own, never
// a slice of the transaction's. fn may run again, on a new database.
func read[T any](d *database, fn func(tx *bbolt.Tx) (T, error)) (T, error) {
	return try(d, readLimit, func(db *bbolt.DB) (v T, err error) {
		err = db.View(func(tx *bbolt.Tx) error {
			v, err = fn(tx)
			return err
		})
		return v, err
	})
}

// write runs fn in a write transaction, durable when it returns. fn must bear
// to run again, and must not wait for the disk or for anybody.
func (d *database) write(fn func(tx *bbolt.Tx) error) error {
	d.writing.lock(d.waits)
	return d.writeInTurn(fn)
}

// writeInTurn gives the turn back.
func (d *database) writeInTurn(fn func(tx *bbolt.Tx) error) error {
	defer d.writing.unlock()
	_, err := try(d, writeLimit, func(db *bbolt.DB) (struct{}, error) {
		return struct{}{}, db.Update(fn)
	})
	return err
}

func try[T any](d *database, limit time.Duration, fn func(db *bbolt.DB) (T, error)) (T, error) {
	for again := false; ; again = true {
		d.mu.RLock()
		db := d.handle
		d.mu.RUnlock()
		if db == nil {
			return *new(T), fmt.Errorf("index.db: %w", os.ErrClosed)
		}
		work := func() (done func()) { return func() {} }
		if d.waits.Working() { // and so does who does it for them
			work = d.waits.Work
		}
		v, err := guard(limit, func() (T, error) {
			defer work()()
			return fn(db)
		})
		if !broken(err) || again {
			return v, err
		}
		if replaceErr := d.replace(db, err); replaceErr != nil {
			return v, errors.Join(err, replaceErr)
		}
	}
}

// replace makes a new database, unless somebody has done so since failed was
// taken.
func (d *database) replace(failed *bbolt.DB, cause error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.handle != failed {
		return nil
	}
	d.making.Store(true)
	defer d.making.Store(false)
	db, err := d.remake(cause.Error())
	if err != nil {
		return err
	}
	d.handle = db
	d.lost(cause)
	return nil
}

// open opens the database, or makes a new one and says why.
func (d *database) open() (why string, err error) {
	if err := d.removeTemp(); err != nil {
		return "", err
	}
	info, err := os.Lstat(d.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		why = "it was missing"
	case err != nil:
		return "", err
	case info.Size() == 0 || !info.Mode().IsRegular():
		why = "it was empty or no file"
	}
	if why == "" {
		db, err := guard(openLimit, func() (*bbolt.DB, error) { return openBolt(d.path, false) })
		if err == nil {
			if err = addBuckets(db); err == nil {
				why, err = schemaProblem(db)
			}
		}
		switch {
		case err == nil && why == "":
			d.handle = db
			return "", nil
		case errors.Is(err, bolterrors.ErrTimeout):
			return "", fmt.Errorf("index.db is in use by another process: %w", err)
		case err != nil && !broken(err):
			return "", err
		case err != nil:
			why = err.Error()
		}
	}
	d.handle, err = d.remake(why)
	return why, err
}

// addBuckets makes the younger buckets.
func addBuckets(db *bbolt.DB) error {
	there, err := guard(readLimit, func() (there bool, err error) {
		err = db.View(func(tx *bbolt.Tx) error {
			there = true
			for _, name := range younger {
				there = there && tx.Bucket(name) != nil
			}
			there = there || tx.Bucket(bucketMeta) == nil // then it is no database of ours
			return nil
		})
		return there, err
	})
	if err != nil || there {
		return err
	}
	_, err = guard(writeLimit, func() (struct{}, error) {
		return struct{}{}, db.Update(func(tx *bbolt.Tx) error {
			for _, name := range younger {
				if _, err := tx.CreateBucketIfNotExists(name); err != nil {
					return err
				}
			}
			return nil
		})
	})
	return err
}

// schemaProblem says why a database cannot be used though it opens.
func schemaProblem(db *bbolt.DB) (string, error) {
	return guard(readLimit, func() (why string, err error) {
		err = db.View(func(tx *bbolt.Tx) error {
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
		return why, err
	})
}

func (d *database) temp() string { return d.path + ".new" }

// spill is where the rows of a new database wait that memory does not hold.
func (d *database) spill() string { return d.path + ".rows" }

func (d *database) removeTemp() error {
	for _, path := range []string{d.temp(), d.spill()} {
		if err := d.fs.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// remake sets aside what has the database's name and makes a new one under
// another name. The rename is the commit point: a crash before it leaves a
// temporary file and no database, and the next start does all this again.
func (d *database) remake(why string) (*bbolt.DB, error) {
	err := cas.SetAside(d.fs, d.dir, d.path, why)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var db *bbolt.DB
	err = d.reserve.use(func() (err error) {
		if err = d.removeTemp(); err == nil {
			db, err = guard(math.MaxInt64, func() (*bbolt.DB, error) { return d.make(nil) })
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make index.db: %w", err)
	}
	return db, nil
}

// make makes a database from the manifests, with what may be lost from an old one;
// nil: there is none.
func (d *database) make(old *bbolt.DB) (db *bbolt.DB, err error) {
	if db, err = openBolt(d.temp(), true); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, db.Close())
		}
	}()
	err = db.Update(func(tx *bbolt.Tx) error {
		for _, name := range buckets {
			if _, err := tx.CreateBucketIfNotExists(name); err != nil {
				return err
			}
		}
		schema := binary.LittleEndian.AppendUint32(nil, schemaVersion)
		if err := put(tx, bucketMeta, []byte("schema"), schema); err != nil {
			return err
		}
		return put(tx, bucketMeta, []byte("space"), encodeSpace(Space{}))
	})
	if err == nil {
		err = d.fill(db)
	}
	if err == nil && old != nil {
		err = keepSoft(db, old)
	}
	if err == nil {
		err = db.Sync()
	}
	if err == nil {
		err = d.fs.Rename(d.temp(), d.path)
	}
	if err == nil {
		err = d.fs.SyncDir(d.dir)
	}
	db.NoSync = false
	return db, err
}

// openBolt opens or makes a database file. The large mapping is address space
// only: it keeps a growing file from being mapped anew, for which bbolt would
// wait until every reader is done, and every new reader for it. The freelist
// stays synced: finding it again cost 382 ms at a million entries.
func openBolt(path string, noSync bool) (*bbolt.DB, error) {
	o := &bbolt.Options{
		Timeout: lockWait, NoSync: noSync, FreelistType: bbolt.FreelistMapType, NoStatistics: true,
		InitialMmapSize: initialMapping(),
	}
	db, err := bbolt.Open(path, 0o600, o)
	if errors.Is(err, syscall.ENOMEM) && o.InitialMmapSize > 0 {
		o.InitialMmapSize = 0 // the process has a limit on its address space
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

// close closes the database, unless it has been given up or hangs.
func (d *database) close() error {
	d.writing.lock(d.waits)
	defer d.writing.unlock()
	d.mu.Lock()
	db := d.handle
	d.handle = nil
	d.mu.Unlock()
	if db == nil {
		return nil
	}
	_, err := guard(writeLimit, func() (struct{}, error) { return struct{}{}, db.Close() })
	return err
}

func newDatabase(fsys cas.FS, dir string, reserve *reserve, waits *cas.Waits) *database {
	return &database{fs: fsys, waits: waits, dir: dir, reserve: reserve, path: filepath.Join(dir, "index.db")}
}
