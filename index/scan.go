package index

import (
	"bytes"
	"context"
	"sync/atomic"

	"go.etcd.io/bbolt"
)

// Going through a bucket with millions of rows: a page is copied in a short
// transaction, and while it is looked at the next one is read.

const (
	// scanRows and scanBytes bound a page, and so its transaction: some
	// milliseconds at most.
	scanRows  = 1 << 10
	scanBytes = 1 << 20 // and one row more
)

// scanned is a page of rows, in one piece of memory.
type scanned struct {
	data []byte
	ends []int // of each key, and of its value
	more bool  // rows follow
	err  error
}

// rows calls fn with every row of a bucket, in order, and stops at its first
// error, which it returns. No transaction stays open for fn, which must not keep
// what it gets.
func (x *Index) rows(ctx context.Context, bucket []byte, fn func(key, value []byte) error) error {
	return x.rowsAfter(ctx, bucket, nil, fn)
}

// rowsAfter is rows from behind a key on.
func (x *Index) rowsAfter(ctx context.Context, bucket, after []byte, fn func(key, value []byte) error) error {
	page := x.scan(ctx, bucket, after, scanned{})
	if err := page.each(fn); err != nil || !page.more { // most buckets have no more than that
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	pages, used := make(chan scanned, 1), make(chan scanned, 3)
	defer func() {
		stop()
		for range pages { // its reader has ended once this is closed
		}
	}()
	last := bytes.Clone(page.lastKey())
	used <- page
	go func() {
		defer close(pages)
		for more := true; more; {
			var into scanned // what was looked through is filled again
			select {
			case into = <-used:
			default:
			}
			page := x.scan(ctx, bucket, last, into)
			if more = page.more && page.err == nil; more {
				last = append(last[:0], page.lastKey()...)
			}
			select {
			case pages <- page:
			case <-ctx.Done():
				return
			}
		}
	}()
	for page := range pages {
		if err := page.each(fn); err != nil {
			return err
		}
		used <- page // there is room for all that there are
	}
	return ctx.Err()
}

// scan reads the page after a key, into the memory of another one if that is
// any. A read that was given up may go on, so what it was given is not used
// again.
func (x *Index) scan(ctx context.Context, bucket, after []byte, into scanned) scanned {
	if err := ctx.Err(); err != nil {
		return scanned{err: err}
	}
	var tried atomic.Bool
	page, err := read(x.db, func(tx *bbolt.Tx) (p scanned, err error) {
		if tried.CompareAndSwap(false, true) { // once more is on another database, while this one may still be read
			p = scanned{data: into.data[:0], ends: into.ends[:0]}
		}
		err = p.fill(tx, bucket, after)
		return p, err
	})
	page.err = err
	return page
}

// fill reads and checks rows.
func (p *scanned) fill(tx *bbolt.Tx, bucket, after []byte) error {
	b := tx.Bucket(bucket)
	if b == nil {
		return &DamageError{"index.db", "no bucket " + string(bucket)}
	}
	var room []byte // for checksums
	c := b.Cursor()
	k, v := c.First()
	if after != nil {
		if k, v = c.Seek(after); bytes.Equal(k, after) {
			k, v = c.Next()
		}
	}
	for ; k != nil; k, v = c.Next() {
		if len(p.ends) >= 2*scanRows || len(p.data) >= scanBytes {
			p.more = true
			return nil
		}
		value, err := unsealIn(&room, bucket, k, v)
		if err != nil {
			return err
		}
		p.data = append(p.data, k...)
		p.ends = append(p.ends, len(p.data))
		p.data = append(p.data, value...)
		p.ends = append(p.ends, len(p.data))
	}
	return nil
}

// each calls fn with every row.
func (p *scanned) each(fn func(key, value []byte) error) error {
	if p.err != nil {
		return p.err
	}
	from := 0
	for i := 0; i < len(p.ends); i += 2 {
		key, end := p.ends[i], p.ends[i+1]
		if err := fn(p.data[from:key:key], p.data[key:end:end]); err != nil {
			return err
		}
		from = end
	}
	return nil
}

// lastKey is that of the last row, of which there is one.
func (p *scanned) lastKey() []byte {
	n, from := len(p.ends), 0
	if n > 2 {
		from = p.ends[n-3]
	}
	return p.data[from:p.ends[n-2]]
}
