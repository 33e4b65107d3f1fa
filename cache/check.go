package cache

import (
	"context"
	"errors"
	"fmt"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// Finding is something that Check did not find as it should be.
type Finding struct {
	Kind   string // "damaged", "missing", "leftover", and those of the index
	Object string
	Detail string
	Builds []index.BuildKey // what needs it
}

// CheckResult is what Check looked at, and what it found.
type CheckResult struct {
	Blobs, Builds uint64
	Bytes         int64
	Findings      []Finding
}

// Check looks at every build's files: with deep by hashing every byte, else by their stamps. With repair, what is
// damaged is put aside and its builds are withheld; the next request compiles them anew.
func (c *Cache) Check(ctx context.Context, p Peer, deep, repair bool) (CheckResult, error) {
	if !c.Administrator(p) {
		return CheckResult{}, fail(NotAllowed, nil, "checking the store is for administrators")
	}
	var out CheckResult
	found, err := c.index.Check(ctx)
	if err != nil {
		return out, checkError(ctx, err)
	}
	for _, f := range found {
		out.Findings = append(out.Findings, Finding{Kind: f.Kind, Object: f.Object, Detail: f.Detail})
	}
	blobs := make(map[cas.Digest]int64)
	err = c.index.Each(ctx, func(b index.Build) error {
		out.Builds++
		for _, f := range b.Blobs() {
			blobs[f.Digest] = f.Size
		}
		return nil
	})
	if err != nil {
		return out, checkError(ctx, err)
	}
	for d, size := range blobs {
		if ctx.Err() != nil {
			return out, checkError(ctx, ctx.Err())
		}
		out.Blobs++
		out.Bytes += size
		if f := c.checkBlob(ctx, d, size, deep); f != nil {
			out.Findings = append(out.Findings, *f)
			if repair {
				c.putAside(d, f.Detail)
			}
		}
	}
	err = c.cas.Walk(ctx, func(d cas.Digest, size int64) error {
		if _, needed := blobs[d]; !needed {
			ids, err := c.index.Needs(d)
			if err != nil || len(ids) > 0 {
				return err // published meanwhile
			}
			out.Findings = append(out.Findings, Finding{Kind: "leftover", Object: d.String(), Detail: fmt.Sprintf("%d bytes that no build needs", size)})
		}
		return nil
	})
	if err != nil {
		return out, checkError(ctx, err)
	}
	return out, nil
}

func checkError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fail(Cancelled, ctx.Err(), "check")
	}
	return fail(Internal, err, "check")
}

// checkBlob gives what is wrong with one blob, nil if nothing is.
func (c *Cache) checkBlob(ctx context.Context, d cas.Digest, size int64, deep bool) *Finding {
	f := &Finding{Object: d.String()}
	have, err := c.cas.Size(d)
	switch {
	case errors.Is(err, cas.ErrNotFound):
		f.Kind, f.Detail = "missing", "the blob is not there"
	case err != nil:
		f.Kind, f.Detail = "damaged", err.Error()
	case have != size:
		f.Kind, f.Detail = "damaged", fmt.Sprintf("%d bytes long, not %d", have, size)
	case deep:
		err = c.cas.Check(ctx, d)
	default:
		err = c.cas.Verify(ctx, d, nil) // hashes only where the stamp does not hold
	}
	if f.Kind == "" {
		if err == nil || ctx.Err() != nil {
			return nil
		}
		f.Kind, f.Detail = "damaged", err.Error()
		if errors.Is(err, cas.ErrNotFound) {
			f.Kind = "missing"
		}
	}
	ids, err := c.index.Needs(d)
	if err != nil {
		return f
	}
	for _, id := range ids {
		b, err := c.index.Get(id)
		switch {
		case err != nil:
		case b.Serves(d):
			f.Builds = append(f.Builds, b.BuildKey)
		default:
			f.Detail += fmt.Sprintf("; it is of the copy of source model %q", b.ModelName)
		}
	}
	return f
}

// putAside withholds every build that has a damaged blob among its files, and moves the blob out of the way. A build
// whose source model alone is damaged is as good as before.
func (c *Cache) putAside(d cas.Digest, why string) {
	if err := c.cas.Quarantine(d, why); err != nil && !errors.Is(err, cas.ErrNotFound) {
		c.log.Error("damaged blob not put aside", "digest", d.String(), "error", err)
	}
	ids, err := c.index.Needs(d)
	if err != nil {
		c.log.Error("builds of a damaged blob not found", "digest", d.String(), "error", err)
	}
	for _, id := range ids {
		if b, err := c.index.Get(id); err == nil && b.Serves(d) {
			c.withholdBuild(id, index.Damaged, why)
		}
	}
}
