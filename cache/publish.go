package cache

import (
	"context"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/views"
)

// store puts the files and then the manifest: from there on the build is acknowledged.
func (j *job) store(ctx context.Context, b *index.Build, out string, hashed map[string]cas.Hashed) (*compiled, error) {
	c := j.c
	if why := j.settle(ctx, b, out); why != nil {
		return c.unkept(b, out, why)
	}
	hold := c.cas.Hold()
	j.kept = make(map[string]index.File) // by this hold
	b.Source = j.keepSource(ctx, 0, hold)
	for i := 1; i < len(b.Members); i++ {
		b.Members[i].Source = j.keepSource(ctx, i, hold)
	}
	defer c.forms.Release(hold)
	m := made{build: b, folder: out, hashed: hashed, peer: j.Peer, room: j.room, kind: event.Compiled,
		text: fmt.Sprintf("by %s in %.2f s", makers(b), b.CompileSeconds)}
	if j.anew != "" {
		m.kind, m.counter, m.replaces = event.Rebuilt, "rebuilds", j.replaces // of other libraries, perhaps
		m.text += ": " + j.anew
	}
	err := c.publish(ctx, m, hold)
	if err != nil && ctx.Err() != nil {
		return nil, apierr.New(apierr.Cancelled, err, "model %q", b.ModelName)
	}
	if err != nil {
		// Not kept is no reason not to serve what is compiled and checked: the application waits for it.
		return c.unkept(b, out, err)
	}
	j.measureGain(b)
	return &compiled{build: b}, nil
}

// made is a build before it is stored.
type made struct {
	build  *index.Build
	folder string                // that its files are in
	hashed map[string]cas.Hashed // of these, as far as that is done
	peer   Peer                  // who asked for it
	room   *reservation

	kind, text string        // of its event
	counter    string        // that counts it besides; "": none
	replaces   index.BuildID // whose pin it inherits, besides those of the same key; zero: none
}

// publish stores a build: from its manifest on it is acknowledged. hold keeps what the build needs
// until then, and is the caller's to release.
func (c *Cache) publish(ctx context.Context, m made, hold *cas.Hold) error {
	b := m.build
	m.room.publishing()
	if err := c.put(ctx, b, m.folder, m.hashed, hold); err != nil {
		return err
	}
	c.forms.Release(hold) // what others keep packed, and was stored whole, counts as that before the place is given back
	m.room.release()      // the build has taken its place, and nothing counts twice
	c.log.Info(m.kind, "model", b.ModelName, "build", b.BuildKey.String(), "seconds", b.CompileSeconds,
		"uid", b.UID, "scope", b.Scope)
	if m.counter != "" {
		c.index.Counters.Add(m.counter, 1)
	}
	c.rights.Saw(m.peer, b) // before the event, or a subscriber who asked for the build would not hear of it
	c.happened(event.Of(b, m.kind, "%s", m.text))
	c.rebuilds.Published(b)
	c.inheritPin(m.replaces, b)
	c.supersede(ctx, b)
	return nil
}

// put makes blobs of the build's files, and publishes it. hold keeps what the build needs until a manifest says that it does;
// it is the caller's to release.
func (c *Cache) put(ctx context.Context, b *index.Build, out string, hashed map[string]cas.Hashed, hold *cas.Hold) error {
	for i := range b.Files {
		f := &b.Files[i]
		var err error
		path := filepath.Join(out, filepath.FromSlash(f.Name))
		if f.Digest, f.Size, err = hold.AdoptHashed(ctx, path, hashed[f.Name]); err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	id, err := hex.DecodeString(newID() + newID())
	if err != nil {
		return err
	}
	copy(b.ID[:], id)
	c.attend.stored(b.ID)
	if err := c.index.Publish(ctx, *b); err != nil {
		return err
	}
	c.sharing.added(b)
	return nil
}

// supersede retracts the earlier builds of the same key: a newer one answers in their place. One that was made with
// another driver stays, for when that comes back, unless it is not served anyway.
func (c *Cache) supersede(ctx context.Context, b *index.Build) {
	builds, err := c.index.Lookup(b.RequestKey, b.Scope)
	if err != nil {
		c.log.Warn("superseded builds not found", "error", err)
		return
	}
	for i := range builds {
		old := &builds[i]
		if served := c.index.Journal.StateOf(old.ID).Name == index.Current; old.BuildKey == b.BuildKey && old.ID != b.ID && (!served || sameDrivers(old.EPs, b.EPs)) {
			if c.index.Journal.StateOf(old.ID).Name == index.Damaged {
				c.happened(event.Of(b, event.Healed, "in place of the build of %s", old.Created.Format(time.RFC3339)))
			}
			c.inheritPin(old.ID, b)
			if err := c.retract(ctx, old, "compiled anew", views.PathGrace); err != nil {
				c.log.Warn("superseded build not removed", "build", old.ID.String(), "error", err)
			}
		}
	}
}

func makers(b *index.Build) string {
	names := make([]string, len(b.EPs))
	for i, ep := range b.EPs {
		names[i] = strings.TrimSpace(ep.Name + " " + ep.Version)
		if ep.SDKVersion != "" {
			names[i] += " (SDK " + ep.SDKVersion + ")"
		}
	}
	return strings.Join(names, ", ")
}

func epNames(eps []identity.EP) string {
	names := make([]string, len(eps))
	for i, ep := range eps {
		names[i] = ep.Name
	}
	return strings.Join(names, ", ")
}

// setAside reserves room for what the job will bring, as far as that can be guessed, so that the collector can make it while
// the compile runs. That there is none yet says nothing: what counts is found out before a byte is stored. To its user's quota a guess does not
// count: others of the user's would go for what is not kept then.
func (j *job) setAside(ctx context.Context, about *jobFacts) {
	if j.scope == "" {
		return
	}
	j.room = &reservation{c: j.c, user: j.Peer.UID}
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
	for _, f := range j.descriptors() {
		if info, err := f.Stat(); err == nil { // else the copy will tell
			sizes = append(sizes, info.Size())
		}
	}
	return sizes
}
