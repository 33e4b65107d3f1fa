package cache

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
)

// neutral takes out of a failure what is the job's own: the names of the private copy and of the folder that it lies in.
func (j *job) neutral(f *failure.Failure) {
	var pairs []string
	out := filepath.Join(j.Folder, outFolder)
	for i := range j.Request.Models() {
		name := failure.ItsModel
		if j.Request.Models() > 1 {
			name = fmt.Sprintf("model %d of the group", i+1)
		}
		if i < len(j.Copies) {
			pairs = append(pairs, j.Copies[i].Path, name, compilers.Spelling(out, j.Copies[i].Path), name)
		}
		made := "what " + name + " became"
		pairs = append(pairs, j.ModelPath(i), name, filepath.Join(out, j.MemberOutput(i)), made,
			filepath.Base(j.ModelPath(i)), name, j.MemberOutput(i), made)
	}
	models := j.ModelFolder()
	for _, folder := range []string{out, models, compilers.Spelling(out, models), j.Folder} {
		pairs = append(pairs, folder+"/", "")
	}
	plain := strings.NewReplacer(pairs...) // where several fit, the first of them does
	f.Text = plain.Replace(f.Text)
	for _, fact := range failure.Words {
		if words, ok := f.Facts[fact]; ok {
			f.Facts[fact] = plain.Replace(words)
		}
	}
}

// plain has a failure of the job speak of the model as who began the job calls it.
func (j *job) plain(e *apierr.Error) {
	f := failure.In(e)
	head, _ := strings.CutSuffix(e.Text, f.Text)
	j.neutral(f)
	f.ModelName = j.Request.Name
	told := f.As(f.ModelName)
	e.Text = head + told.Text
	maps.Copy(e.Facts, told.Facts)
}

// Failures lists the compiles that failed and are answered from memory, as far as the peer may know of them, the newest
// first.
func (c *Cache) Failures(ctx context.Context, p request.Peer) ([]failure.Failure, error) {
	if err := ctx.Err(); err != nil {
		return nil, apierr.New(apierr.Cancelled, err, "failures")
	}
	return c.failures.List(c.hears(p), nil), nil
}

// Retry forgets failures, so that the next request compiles again: those that the names mean, as in Show, or all of the
// peer's; for administrators all there are. It gives what was forgotten. A name that means nothing is an error.
func (c *Cache) Retry(ctx context.Context, p request.Peer, entries []string, all bool) ([]failure.Failure, error) {
	if err := ctx.Err(); err != nil {
		return nil, apierr.New(apierr.Cancelled, err, "retry")
	}
	if all == (len(entries) > 0) {
		return nil, apierr.New(apierr.BadRequest, nil, "retry: name entries, or say all")
	}
	known := c.failures.List(c.hears(p), nil)
	for _, name := range entries {
		if !slices.ContainsFunc(known, func(f failure.Failure) bool { return f.Means(name) }) {
			return nil, apierr.New(apierr.NotFound, nil, "no failure is remembered of %q", name).WithHint("epcachectl jobs lists those that are")
		}
	}
	return c.failures.List(c.hears(p), func(f *failure.Failure) bool { return all || slices.ContainsFunc(entries, f.Means) }), nil
}

// hears says of which failures the peer may hear.
func (c *Cache) hears(p request.Peer) failure.Audience {
	return failure.Audience{UID: p.UID, Scope: rights.OwnScope(p), All: c.rights.Administrator(p)}
}
