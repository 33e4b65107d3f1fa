package cache

import (
	"context"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// setAside reserves room for what the job will bring, as far as that can be guessed, so that the collector can make it while
// the compile runs. That there is none yet says nothing: what counts is found out before a byte is stored. To its user's quota a guess does not
// count: others of the user's would go for what is not kept then.
func (j *job) setAside(ctx context.Context, about *jobFacts) {
	if j.scope == "" {
		return
	}
	j.room = &reservation{c: j.c, user: j.request.Peer.UID}
	disk, _ := needOf(j.c.flights.costs.Output(about.kind()))
	_ = j.room.resizeTo(ctx, false, disk, 0)
}

// settle makes the reservation as large as what was compiled, whose files have these sizes, and says why there is no room for it, if there is none.
func (j *job) settle(ctx context.Context, b *index.Build, out string) (why error) {
	var sizes []int64
	j.output = 0
	for _, f := range b.Files {
		info, err := os.Lstat(filepath.Join(out, filepath.FromSlash(f.Name)))
		if err != nil {
			return err
		}
		sizes = append(sizes, info.Size())
		j.output += info.Size()
	}
	if j.c.settings.Load().keepSource == KeepCopy {
		sizes = append(sizes, j.sourceSizes()...)
	}
	j.room.written = writtenOf(b, sizes)
	return j.room.resize(ctx, true, sizes...)
}

// writtenOf is what of a compile's result is on the disk already: sizes are those of its files, and then of what is copied.
func writtenOf(b *index.Build, sizes []int64) (disk int64) {
	for _, size := range sizes[:min(len(b.Files), len(sizes))] {
		disk += cas.OnDisk(size)
	}
	return disk
}

// sourceSizes are those of the files that are kept as copies of the source models.
func (j *job) sourceSizes() (sizes []int64) {
	for _, f := range j.request.descriptors() {
		if info, err := f.Stat(); err == nil { // else the copy will tell
			sizes = append(sizes, info.Size())
		}
	}
	return sizes
}
