package index

import (
	"bytes"
	"cmp"
	"context"

	"go.etcd.io/bbolt"
)

// A bucket may have millions of rows. It is read in pages: each page is copied in a short
// transaction, and while its rows are processed the next one is read. Without reading ahead, a plan
// for a million builds takes a third longer.

const (
	// scanRows and scanBytes bound a page, and so its transaction, which takes some milliseconds.
	scanRows  = 1 << 10
	scanBytes = 1 << 20 // a page may exceed it by one row
)

// scanned is a page of rows, in one piece of memory.
type scanned struct {
	data    []byte
	keyEnds []int // of each key, and of its value
	hasMore bool  // rows follow
	err     error
}

// rows calls fn with every row of a bucket, in order, and stops at its first error, which it
// returns. No transaction is open while fn runs, which must not keep its arguments.
func (d *database) rows(ctx context.Context, bucket []byte,
	fn func(key, value []byte) error) error {
	return d.rowsFrom(ctx, bucket, nil, nil, fn)
}

// rowsFrom is rows, for keys that begin with prefix and follow after.
func (d *database) rowsFrom(ctx context.Context, bucket, prefix, after []byte, fn func(key,
	value []byte) error) error {
	next := make(chan scanned, 1)
	read := func(after []byte, into scanned) { next <- d.scan(bucket, prefix, after, into) }
	go read(after, scanned{})
	for spare := (scanned{}); ; {
		page := <-next
		if err := cmp.Or(page.err, ctx.Err()); err != nil {
			return err
		}
		if page.hasMore {
			go read(page.lastKey(), spare)
		}
		if err := page.each(fn); err != nil {
			if page.hasMore {
				<-next
			}
			return err
		}
		if !page.hasMore {
			return nil
		}
		spare = page // processed, so its memory is reused
	}
}

// scan reads the page that follows a key, into the memory of another page.
func (d *database) scan(bucket, prefix, after []byte, into scanned) scanned {
	p, err := read(d, func(tx *bbolt.Tx) (p scanned, err error) {
		p.data, p.keyEnds = into.data[:0], into.keyEnds[:0]
		var scratch []byte // for checksums
		err = eachRow(tx, bucket, prefix, after, func(k, v []byte) (bool, error) {
			if len(p.keyEnds) >= 2*scanRows || len(p.data) >= scanBytes {
				p.hasMore = true
				return false, nil
			}
			value, err := unsealIn(&scratch, bucket, k, v)
			p.data = append(p.data, k...)
			p.keyEnds = append(p.keyEnds, len(p.data))
			p.data = append(p.data, value...)
			p.keyEnds = append(p.keyEnds, len(p.data))
			return true, err
		})
		return p, err
	})
	p.err = err
	return p
}

// each calls fn with every row.
func (p *scanned) each(fn func(key, value []byte) error) error {
	from := 0
	for i := 0; i < len(p.keyEnds); i += 2 {
		key, end := p.keyEnds[i], p.keyEnds[i+1]
		if err := fn(p.data[from:key:key], p.data[key:end:end]); err != nil {
			return err
		}
		from = end
	}
	return nil
}

// lastKey returns the key of the last row, of which there is one.
func (p *scanned) lastKey() []byte {
	n, from := len(p.keyEnds), 0
	if n > 2 {
		from = p.keyEnds[n-3]
	}
	return p.data[from:p.keyEnds[n-2]]
}

// eachRow calls fn, within a transaction, with the rows that have keys which begin with prefix and
// follow after, as they are stored, until it returns false or an error.
func eachRow(tx *bbolt.Tx, bucket, prefix, after []byte, fn func(key, sealed []byte) (more bool,
	err error)) error {
	b, err := bucketOf(tx, bucket)
	if err != nil {
		return err
	}
	from := prefix
	if bytes.Compare(after, from) > 0 {
		from = after
	}
	c := b.Cursor()
	for k, v := c.Seek(from); k != nil && bytes.HasPrefix(k, prefix); k, v = c.Next() {
		if bytes.Equal(k, after) {
			continue
		}
		if more, err := fn(k, v); err != nil || !more {
			return err
		}
	}
	return nil
}
