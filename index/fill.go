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

// A new database is filled from all manifests: they are read on all cores, and every bucket is
// written from its first row to its last, so that each page is written once. Inserted build by
// build, rows that begin with digests go to pages all over the file, and each transaction writes
// most of them again: of 100,000 builds that took three times as long, of more it took more each.

// filler is the filling of one database.
type filler struct {
	x  *Index
	db *bbolt.DB

	// Rows whose keys come in another order than builds: each is a key and its value. Together they
	// take some 500 bytes for each build, while the database is made.
	requests, names, blobs [][]byte
	entries                []RequestKey // of each build

	space   Space
	users   map[uint32]UserSpace
	written int       // of these rows
	told    time.Time // when the progress was last reported
}

const (
	fillRows = 1 << 13         // rows in a transaction
	fullness = 0.9             // of pages: some space is left for later rows
	tellFill = 2 * time.Second // how often the progress is reported
)

// fillAll fills a new database from all manifests.
func (x *Index) fillAll(db *bbolt.DB) error {
	f := &filler{x: x, db: db, users: make(map[uint32]UserSpace), told: x.now()}
	var times [256]folderTimes
	for i := range x.folders {
		times[i] = x.lookAt(byte(i)) // before listing, so that a later change shows
		ids, err := x.list(byte(i))
		if err != nil {
			return err
		}
		if err := f.folder(ids); err != nil {
			return err
		}
		f.tell(60 * i / len(x.folders)) // reading takes most of the time
	}
	for _, rows := range [][][]byte{f.requests, f.names, f.blobs} {
		slices.SortFunc(rows, bytes.Compare) // no key begins as a whole other one
	}
	slices.SortFunc(f.entries, func(a, b RequestKey) int { return bytes.Compare(a[:], b[:]) })
	f.space.Entries = uint64(len(slices.Compact(f.entries)))
	err := f.put(bucketRequests, f.requests, 0)
	if err == nil {
		err = f.put(bucketNames, f.names, 0)
	}
	if err == nil {
		f.measure()
		err = f.put(bucketBlobs, f.blobs, blobValue)
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
			key := binary.BigEndian.AppendUint32(nil, uid)
			if err := put(tx, bucketUsers, key, encodeUser(f.users[uid])); err != nil {
				return err
			}
		}
		return put(tx, bucketMeta, []byte("space"), encodeSpace(f.space))
	})
}

// tell reports the progress every few seconds.
func (f *filler) tell(percent int) {
	if now := f.x.now(); now.Sub(f.told) >= tellFill {
		f.told = now
		f.x.tellMaking(f.space.Builds, percent)
	}
}

// tellMaking reports how many builds the database has taken in, and how far it is.
func (x *Index) tellMaking(builds uint64, percent int) {
	x.log.Info("index.db is being made from the manifests",
		"store", x.dir, "builds", builds, "percent", percent)
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
	for part := range slices.Chunk(ids, flushPage) {
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
		if err != nil {
			return err
		}
		for i := range builds {
			f.take(&builds[i])
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

// few is how many things one goroutine does as fast as several.
const few = 16

// onAllCores calls fn with each number below n.
func onAllCores(n int, fn func(i int)) {
	var group sync.WaitGroup
	var next atomic.Int64
	for range max(1, min(runtime.NumCPU(), n/few)) {
		group.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				fn(int(i))
			}
		})
	}
	group.Wait()
}

// load reads manifests, and leaves out those that are damaged or newer.
func (f *filler) load(ids []BuildID) ([]filled, error) {
	all := make([]filled, len(ids))
	onAllCores(len(ids), func(i int) {
		one := &all[i]
		if one.build, one.err = f.x.readManifest(ids[i]); one.err == nil {
			one.set(f.x)
		}
	})
	out := all[:0]
	for i := range all {
		one := &all[i]
		if one.err != nil {
			b, ok := f.x.loadManifest(ids[i]) // which reports what is wrong, and moves it away
			if !ok {
				continue
			}
			if one.build = b; one.set(f.x) != nil {
				return nil, one.err
			}
		}
		out = append(out, *one)
	}
	return out, nil
}

func (one *filled) set(x *Index) error {
	one.brief = briefOf(&one.build)
	one.brief.manifest = x.manifestBytes(one.build.ID)
	one.body, one.err = marshalBuild(one.build)
	return one.err
}

// take counts a build, and keeps the rows that are put when all are known.
func (f *filler) take(one *filled) {
	b := &one.build
	f.space.Builds++
	f.space.ManifestBytes += one.brief.manifest
	f.space.LogicalBytes += one.brief.LogicalBytes
	f.users[b.UID] = f.users[b.UID].with(&one.brief, 1)
	f.entries = append(f.entries, b.RequestKey)
	for _, key := range b.keys() {
		f.requests = append(f.requests, requestRow(b, key))
	}
	f.names = append(f.names, b.nameRows()...)
	for d, size := range distinct(*b) {
		f.blobs = append(f.blobs, append(blobKey(d, b.ID), numbers(uint64(size), 0)...))
	}
}

// put writes a bucket, whose rows are in order. So many bytes at the end of each are its value.
func (f *filler) put(bucket []byte, rows [][]byte, value int) error {
	for part := range slices.Chunk(rows, fillRows) {
		err := f.db.Update(func(tx *bbolt.Tx) error {
			inOrder(tx, bucket)
			for _, row := range part {
				key := row[:len(row)-value]
				if err := put(tx, bucket, key, row[len(key):]); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		f.written += len(part)
		f.tell(60 + 40*f.written/(len(f.requests)+len(f.names)+len(f.blobs)))
	}
	return nil
}

// measure asks what each blob takes on the disk, and completes the rows.
func (f *filler) measure() {
	var first []int // of each blob's rows
	for i, row := range f.blobs {
		if i == 0 || !bytes.HasPrefix(f.blobs[i-1], row[:len(cas.Digest{})]) {
			first = append(first, i)
		}
	}
	sizes, disks := make([]int64, len(first)), make([]int64, len(first))
	onAllCores(len(first), func(i int) {
		row := f.blobs[first[i]]
		v := fields{b: row[len(row)-blobValue:]}
		sizes[i] = v.i64()
		disks[i] = f.x.blobBytes(cas.Digest(row[:len(cas.Digest{})]), sizes[i])
	})
	for i, from := range first {
		f.space.UniqueBytes += sizes[i]
		f.space.DiskBytes += disks[i]
		to := len(f.blobs)
		if i+1 < len(first) {
			to = first[i+1]
		}
		for _, row := range f.blobs[from:to] {
			binary.LittleEndian.PutUint64(row[len(row)-8:], uint64(disks[i]))
		}
	}
}
