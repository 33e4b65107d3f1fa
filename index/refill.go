package index

import (
	"errors"
	"math"

	"go.etcd.io/bbolt"
)

// A database that knows few of the builds whose manifests are there, as after a
// restore beside an older index.db, is made anew like one that is missing. Taken in
// one after the other, the rows would go to pages all over the file, and
// each transaction would write most of them once more: of 100,000 builds that took
// three times as long, of more it took more each. What only the old one knows is kept.

// manyMissing is how many builds a database lacks before that pays.
const manyMissing = 1 << 10

// lacksMany reports whether so many builds are better taken in by refill.
func (x *Index) lacksMany(missing int) bool {
	if missing < manyMissing {
		return false
	}
	space, err := x.Space()
	return err == nil && uint64(missing) > space.Builds/4 // else whoever reads it next finds out
}

// refill makes a new database from the manifests, with what may be lost taken from the
// one that is open. Nobody else uses that yet. A crash before the new one
// has its name leaves the old one.
func (d *database) refill() error {
	old := d.handle
	var db *bbolt.DB
	err := d.reserve.use(func() (err error) {
		if err = d.removeTemp(); err == nil {
			db, err = guard(math.MaxInt64, func() (*bbolt.DB, error) { return d.make(old) })
		}
		return err
	})
	if broken(err) {
		return d.replace(old, err) // what is lost with it may be
	}
	if err != nil {
		return err
	}
	d.mu.Lock()
	d.handle = db
	d.mu.Unlock()
	_, err = guard(writeLimit, func() (struct{}, error) { return struct{}{}, old.Close() })
	return err
}

// softBuckets are those of which the manifests say nothing.
var softBuckets = [][]byte{bucketStamps, bucketMemo, bucketUse, bucketViews, bucketCounters, bucketFailures, bucketUnpacked, bucketProven,
	bucketSketches, bucketShares, bucketWanted}

// keepSoft takes the rows over that may be lost. One that is damaged is.
func keepSoft(db, old *bbolt.DB) error {
	for _, bucket := range softBuckets {
		for after := []byte(nil); ; {
			last, err := keepSome(db, old, bucket, after)
			if err != nil {
				return err
			}
			if last == nil {
				break
			}
			after = last
		}
	}
	return nil
}

// keepSome takes over so many rows behind a key, and gives the last one's key; nil where there are no more.
func keepSome(db, old *bbolt.DB, bucket, after []byte) (last []byte, err error) {
	err = old.View(func(from *bbolt.Tx) error {
		b := from.Bucket(bucket)
		if b == nil {
			return errors.New("no bucket " + string(bucket))
		}
		return db.Update(func(to *bbolt.Tx) error {
			inOrder(to, bucket)
			into, builds := to.Bucket(bucket), to.Bucket(bucketBuilds)
			ofBuilds := string(bucket) == string(bucketUse) || string(bucket) == string(bucketViews)
			c := b.Cursor()
			k, v := c.First()
			if after != nil {
				c.Seek(after) // which is there: nobody changes it
				k, v = c.Next()
			}
			for n := 0; k != nil && n < fillRows; n++ {
				if _, err := unseal(bucket, k, v); err == nil && (!ofBuilds || builds.Get(k) != nil) {
					if err := into.Put(k, v); err != nil {
						return err
					}
				}
				last = append(last[:0], k...)
				k, v = c.Next()
			}
			return nil
		})
	})
	return last, err
}
