package index

import (
	"bytes"
	"encoding/binary"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

// A new database is filled from all manifests: they are read on all cores, and
// every bucket is written from its first row to its last. Inserted one build
// after the other, rows that begin with digests would go to pages all over the file,
// and each transaction would write most of them once more.

// filler is the filling of one database.
type filler struct {
	x  *Index
	db *bbolt.DB

	requests, names, blobs sorter
	spill                  spill

	space Space
	users map[uint32]UserSpace
	told  time.Time // when the progress was last told
	steps int       // done, of the folders and of 64 for each bucket that is sorted
}

const (
	fillRows = 1 << 13         // rows a transaction
	fullness = 0.9             // of pages: some room is left for what comes
	tellFill = 5 * time.Second // how often the progress is told
)

// fillAll fills a new database from all manifests. It is called for one
// database at a time.
func (x *Index) fillAll(db *bbolt.DB) (err error) {
	f := &filler{x: x, db: db, users: make(map[uint32]UserSpace), told: x.now(), spill: spill{fs: x.fs, path: x.db.spill()}}
	defer func() { err = firstOf(err, f.spill.close()) }()
	f.requests = sorter{of: byFirstByte, spill: &f.spill}
	f.blobs = sorter{of: byFirstByte, spill: &f.spill}
	f.names = sorter{of: func(key []byte) int { return (int(key[0])*256 + int(key[1])) / int(nameKinds) }, spill: &f.spill}
	var times [256]folderTimes
	for i := range x.folders {
		times[i] = x.lookAt(byte(i)) // before listing: a later change shows
		ids, err := x.list(byte(i))
		if err != nil {
			return err
		}
		if err := f.folder(ids); err != nil {
			return err
		}
		f.tell()
	}
	err = f.putSorted(&f.requests, bucketRequests, f.countEntries)
	if err == nil {
		err = f.putSorted(&f.names, bucketNames, nil)
	}
	if err == nil {
		err = f.putSorted(&f.blobs, bucketBlobs, f.measure)
	}
	if err != nil {
		return err
	}
	return db.Update(func(tx *bbolt.Tx) error {
		for i, t := range times {
			if err := x.noteFolder(tx, byte(i), t); err != nil {
				return err
			}
		}
		for _, uid := range slices.Sorted(maps.Keys(f.users)) {
			if err := put(tx, bucketUsers, binary.BigEndian.AppendUint32(nil, uid), encodeUser(f.users[uid])); err != nil {
				return err
			}
		}
		return put(tx, bucketMeta, []byte("space"), encodeSpace(f.space))
	})
}

// tell says how far it is, every few seconds. It is called for each folder, and for each
// 64th part of each of the three buckets that are sorted: reading takes most of the time.
func (f *filler) tell() {
	f.steps++
	now := f.x.now()
	if now.Sub(f.told) < tellFill {
		return
	}
	f.told = now
	percent := f.steps * 100 / (len(f.x.folders) + 3*64)
	f.x.tellMaking(f.space.Builds, percent)
}

// tellMaking says how many builds the database has taken in, and how far it is.
func (x *Index) tellMaking(builds uint64, percent int) {
	x.log.Info("index.db is being made from the manifests", "store", x.dir, "builds", builds, "percent", percent)
	if x.making != nil {
		x.making(builds, percent)
	}
}

// filled is a manifest with the rows that stand by themselves.
type filled struct {
	build Build
	brief Brief
	body  []byte
	err   error
}

// folder takes the manifests of one folder in. The folders come in order, and
// so do the ids in them.
func (f *filler) folder(ids []BuildID) error {
	slices.SortFunc(ids, func(a, b BuildID) int { return bytes.Compare(a[:], b[:]) })
	for len(ids) > 0 {
		part := ids[:min(flushPage, len(ids))]
		ids = ids[len(part):]
		builds, err := f.load(part)
		if err == nil {
			err = f.db.Update(func(tx *bbolt.Tx) error {
				inOrder(tx, bucketBuilds, bucketBriefs)
				for i := range builds {
					one := &builds[i]
					err := put(tx, bucketBuilds, one.build.ID[:], one.body)
					err = firstOf(err, put(tx, bucketBriefs, one.build.ID[:], encodeBrief(&one.brief)))
					if err != nil {
						return err
					}
				}
				return nil
			})
		}
		for i := range builds {
			err = firstOf(err, f.take(&builds[i]))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// inOrder says that rows come in order: pages can be filled.
func inOrder(tx *bbolt.Tx, buckets ...[]byte) {
	for _, name := range buckets {
		if b := tx.Bucket(name); b != nil { // else put says so
			b.FillPercent = fullness
		}
	}
}

// few is how many manifests one goroutine reads as fast as several.
const few = 16

// load reads manifests. What is no good is left out.
func (f *filler) load(ids []BuildID) ([]filled, error) {
	all := make([]filled, len(ids))
	var group sync.WaitGroup
	var next atomic.Int64
	for range max(1, min(runtime.NumCPU(), len(ids)/few)) {
		group.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(ids)); i = next.Add(1) - 1 {
				all[i].read(f.x, ids[i])
			}
		})
	}
	group.Wait()
	out := all[:0]
	for i := range all {
		if one := &all[i]; one.err != nil {
			b, ok := f.x.loadManifest(ids[i]) // which says what is wrong, and moves it away
			if !ok {
				continue
			}
			if one.set(f.x, b); one.err != nil {
				return nil, one.err
			}
		}
		out = append(out, all[i])
	}
	return out, nil
}

func (one *filled) read(x *Index, id BuildID) {
	b, err := x.readManifest(id)
	if one.err = err; err == nil {
		one.set(x, b)
	}
}

func (one *filled) set(x *Index, b Build) {
	one.build, one.brief = b, briefOf(&b)
	one.brief.manifest = x.manifestBytes(b.ID)
	one.body, one.err = marshalBuild(b)
}

// take counts a build, and takes the rows that are put when all are known.
func (f *filler) take(one *filled) error {
	b := &one.build
	f.space.Builds++
	f.space.ManifestBytes += one.brief.manifest
	f.space.LogicalBytes += one.brief.LogicalBytes
	f.users[b.UID] = f.users[b.UID].with(&one.brief, 1)
	err := eachRequestRow(b, func(key []byte) error {
		own := byte(0)
		if bytes.HasPrefix(key, b.RequestKey[:]) {
			own = 1
		}
		return f.requests.add(key, own)
	})
	err = firstOf(err, eachNameRow(b, func(key []byte) error { return f.names.add(key) }))
	for d, size := range distinct(*b) {
		err = firstOf(err, f.blobs.add(blobKey(d, b.ID), numbers(uint64(size))...))
	}
	return err
}

// putSorted writes a bucket. finish makes the values of a part's rows from what
// was kept of them; nil: they have none.
func (f *filler) putSorted(s *sorter, bucket []byte, finish func(rows []sortRow)) error {
	parts := 0
	return s.each(func(rows []sortRow) error {
		if parts++; parts%4 == 0 {
			f.tell()
		}
		if finish != nil {
			finish(rows)
		}
		for len(rows) > 0 {
			part := rows[:min(fillRows, len(rows))]
			rows = rows[len(part):]
			err := f.db.Update(func(tx *bbolt.Tx) error {
				inOrder(tx, bucket)
				for i := range part {
					if err := put(tx, bucket, part[i].key, part[i].value); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// countEntries counts request keys that are some build's own.
func (f *filler) countEntries(rows []sortRow) {
	var last RequestKey
	counted := false
	for i := range rows {
		if key := RequestKey(rows[i].key[:len(last)]); key != last || i == 0 {
			last, counted = key, false
		}
		if rows[i].value[0] == 1 && !counted {
			f.space.Entries++
			counted = true
		}
		rows[i].value = nil
	}
}

// measure asks what each blob takes on the disk, on all cores.
func (f *filler) measure(rows []sortRow) {
	var group sync.WaitGroup
	sums := make([]Space, max(1, min(runtime.NumCPU(), len(rows)/few)))
	for turn := range sums {
		from, to := firstOfBlob(rows, len(rows)*turn/len(sums)), firstOfBlob(rows, len(rows)*(turn+1)/len(sums))
		group.Go(func() { f.x.measureRows(rows[from:to], &sums[turn]) })
	}
	group.Wait()
	for _, s := range sums {
		f.space.StoredBytes += s.StoredBytes
		f.space.DiskBytes += s.DiskBytes
	}
}

// firstOfBlob gives the first row at this place or after it that is another blob's than the one before.
func firstOfBlob(rows []sortRow, i int) int {
	for i > 0 && i < len(rows) && bytes.Equal(rows[i].key[:len(cas.Digest{})], rows[i-1].key[:len(cas.Digest{})]) {
		i++
	}
	return i
}

func (x *Index) measureRows(rows []sortRow, sum *Space) {
	var last cas.Digest
	disk := int64(0)
	for i := range rows {
		v := fields{b: rows[i].value}
		size := v.i64()
		if d := cas.Digest(rows[i].key[:len(last)]); d != last || i == 0 {
			last, disk = d, x.blobBytes(d, size)
			sum.StoredBytes += size
			sum.DiskBytes += disk
		}
		rows[i].value = numbers(uint64(size), uint64(disk))
	}
}
