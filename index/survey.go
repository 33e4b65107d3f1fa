package index

import (
	"context"
	"encoding/binary"
	"math"
	"time"

	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

// Brief has the fields of a build that decisions about space need. It takes about a hundred bytes,
// where the whole record takes thousands.
type Brief struct {
	ID             BuildID
	RequestKey     RequestKey
	Scope          string
	UID            uint32 // the user that requested it
	Put            bool
	EP             string     // the first execution provider
	ModelName      string     // cut at 255 bytes
	ModelDigest    cas.Digest // for a group, the first model's
	Created        time.Time
	CompileSeconds float64
	LogicalBytes   int64 // of its files and its copied source model
	Use            Usage
	Viewed         bool     // it has or had a view
	Blobs          []uint32 // each once, as an index into Survey.Blobs

	manifest int64 // bytes on disk of its manifest
}

// Blob is one blob of a survey.
type Blob struct {
	Size, Disk int64  // bytes: of the content, and on the disk
	Needs      uint32 // builds that need it
}

// Survey has the briefs of all builds, and their blobs. It is no snapshot: it may or may not have
// builds that were published or removed while it was made, but the bytes and needs of needed blobs
// are never too low.
type Survey struct {
	Builds []Brief
	Blobs  []Blob
	// At has the indices in Blobs of the requested blobs that builds need.
	At map[cas.Digest]uint32
}

// Survey reads the whole store, page by page. It returns the positions of the blobs in at, and
// keeps no digest of the others, because there may be millions. progress may be nil.
func (x *Index) Survey(ctx context.Context, at map[cas.Digest]struct{},
	progress Progress) (*Survey, error) {
	if err := x.rows.flush(); err != nil {
		x.Log.Warn("a survey lacks the latest uses", "store", x.dir, "error", err)
	}
	space, err := x.Space()
	if err != nil {
		return nil, err
	}
	// allocated at once, with spare space for builds that are added meanwhile, because growing
	// would copy it repeatedly
	n := space.Builds + space.Builds/64
	s := &Survey{Builds: make([]Brief, 0, n), At: make(map[cas.Digest]uint32, len(at))}
	of := make(map[BuildID]uint32, n) // index in Builds
	texts := make(map[string]string)  // equal texts share memory
	retracting := x.retracting()
	err = x.db.rows(ctx, bucketBriefs, func(key, value []byte) error {
		b, err := decodeBrief(key, value, texts)
		if err == nil && !retracting[b.ID] {
			of[b.ID] = uint32(len(s.Builds))
			s.Builds = append(s.Builds, b)
			progress.reportEvery("builds", uint64(len(s.Builds)), space.Builds)
		}
		return err
	})
	if err == nil {
		err = x.surveyBlobs(ctx, s, of, at, retracting, progress)
	}
	if err == nil {
		err = x.db.rows(ctx, bucketUse, func(key, value []byte) error {
			id, err := idAtEnd(key)
			if i, ok := of[id]; ok {
				s.Builds[i].Use = decodeUse(value)
			}
			return err
		})
	}
	if err == nil {
		err = x.db.rows(ctx, bucketViews, func(key, _ []byte) error {
			id, err := idAtEnd(key)
			if i, ok := of[id]; ok {
				s.Builds[i].Viewed = true
			}
			return err
		})
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// EachBrief calls fn with the brief of every build with an id after this one, in order of ids,
// without use, view and blobs, and stops at fn's first error, which it returns. fn must not keep
// its argument; it may call any method.
func (x *Index) EachBrief(ctx context.Context, after BuildID, fn func(*Brief) error) error {
	texts := make(map[string]string)
	return x.db.rowsFrom(ctx, bucketBriefs, nil, after[:], func(key, value []byte) error {
		b, err := decodeBrief(key, value, texts)
		if err != nil || x.isRetracting(b.ID) {
			return err
		}
		return fn(&b)
	})
}

// surveyBlobs reads which builds need which blobs. The rows come in order of
// digests; they are sorted by builds afterwards.
func (x *Index) surveyBlobs(ctx context.Context, s *Survey, of map[BuildID]uint32,
	at map[cas.Digest]struct{}, retracting map[BuildID]bool, progress Progress) error {
	type need struct{ build, blob uint32 }
	// most builds have a graph and a context binary
	needs := make([]need, 0, 2*len(s.Builds)+len(s.Builds)/4)
	s.Blobs = make([]Blob, 0, cap(needs))
	counts := make([]uint32, len(s.Builds)+1)
	var last cas.Digest
	err := x.db.rows(ctx, bucketBlobs, func(key, value []byte) error {
		n, err := decodeNeed(key, value)
		if err != nil {
			return err
		}
		if n.Blob != last || len(s.Blobs) == 0 {
			last = n.Blob
			if _, ok := at[last]; ok {
				s.At[last] = uint32(len(s.Blobs))
			}
			s.Blobs = append(s.Blobs, Blob{Size: n.Size, Disk: n.Disk})
			progress.reportEvery("files", uint64(len(s.Blobs)), 0)
		}
		if retracting[n.Build] {
			return nil
		}
		s.Blobs[len(s.Blobs)-1].Needs++
		if build, ok := of[n.Build]; ok { // otherwise it was published in the meantime
			needs = append(needs, need{build, uint32(len(s.Blobs) - 1)})
			counts[build+1]++
		}
		return nil
	})
	if err != nil {
		return err
	}
	for i := range s.Builds {
		counts[i+1] += counts[i]
	}
	flat := make([]uint32, len(needs))
	// counts[i] advances from the first position of build i to that of the next build
	for _, n := range needs {
		flat[counts[n.build]] = n.blob
		counts[n.build]++
	}
	from := uint32(0)
	for i := range s.Builds {
		s.Builds[i].Blobs = flat[from:counts[i]:counts[i]]
		from = counts[i]
	}
	return nil
}

func briefOf(b *Build) Brief {
	out := Brief{ID: b.ID, RequestKey: b.RequestKey, Scope: b.Scope, UID: b.UID, Put: b.Put,
		Created: b.Created, CompileSeconds: b.CompileSeconds,
		ModelName: b.ModelName, ModelDigest: b.ModelDigest}
	if len(b.EPs) > 0 {
		out.EP = b.EPs[0].Name
	}
	for _, f := range b.Blobs() {
		out.LogicalBytes += f.Size
	}
	return out
}

// A brief: request key, 32; model digest, 32; created i64; compile seconds as IEEE 754; logical
// bytes i64; bytes of the manifest on disk i64; user id u32; 1 if it was put u8; length of the
// scope u8; scope; length of the execution provider's name u8; that name; the model's name.
func encodeBrief(b *Brief) []byte {
	out := append(make([]byte, 0, 192), b.RequestKey[:]...)
	out = append(out, b.ModelDigest[:]...)
	out = append(out, encodeNumbers(uint64(nanos(b.Created)), math.Float64bits(b.CompileSeconds),
		uint64(b.LogicalBytes), uint64(b.manifest))...)
	out = binary.LittleEndian.AppendUint32(out, b.UID)
	put := byte(0)
	if b.Put {
		put = 1
	}
	scope, ep := shorten(b.Scope, 255), shorten(b.EP, 255)
	out = append(append(out, put, byte(len(scope))), scope...)
	out = append(append(out, byte(len(ep))), ep...)
	return append(out, shorten(b.ModelName, 255)...)
}

const briefHead = 2*32 + 4*8 + 4 + 1 + 1

// decodeBrief decodes a brief. Equal texts share memory in texts.
func decodeBrief(key, v []byte, texts map[string]string) (Brief, error) {
	bad := &DamageError{File: "index.db", Reason: "a brief record that is invalid"}
	b := Brief{}
	if len(key) != len(b.ID) || len(v) < briefHead {
		return b, bad
	}
	copy(b.ID[:], key)
	copy(b.RequestKey[:], v)
	copy(b.ModelDigest[:], v[32:])
	f := fields{b: v[64:]}
	b.Created, b.CompileSeconds = fromNanos(f.i64()), math.Float64frombits(f.u64())
	b.LogicalBytes, b.manifest = f.i64(), f.i64()
	b.UID, b.Put = binary.LittleEndian.Uint32(v[96:]), v[100] == 1
	scope, rest, ok := logicalBytes(v[briefHead-1:])
	ep, name, ok2 := logicalBytes(rest)
	if !ok || !ok2 {
		return b, bad
	}
	b.Scope, b.EP, b.ModelName = intern(texts, scope), intern(texts, ep), string(name)
	return b, nil
}

// logicalBytes splits off a text that is preceded by its length.
func logicalBytes(b []byte) (text, rest []byte, ok bool) {
	if len(b) == 0 || len(b) < 1+int(b[0]) {
		return nil, nil, false
	}
	return b[1 : 1+int(b[0])], b[1+int(b[0]):], true
}

func intern(texts map[string]string, b []byte) string {
	if s, ok := texts[string(b)]; ok {
		return s
	}
	s := string(b)
	if texts != nil {
		texts[s] = s
	}
	return s
}

func briefRow(tx *bbolt.Tx, id BuildID) (Brief, error) {
	v, err := get(tx, bucketBriefs, id[:])
	if err != nil {
		return Brief{}, err
	}
	return decodeBrief(id[:], v, nil)
}

// UserSpace has the bytes of the builds that a user requested. Shared bytes count for each build.
type UserSpace struct {
	LogicalBytes int64
	PutBytes     int64 // of builds that the user put
	Builds       uint64
}

// with returns the sums with a build added, or with sign -1 subtracted.
func (u UserSpace) with(b *Brief, sign int64) UserSpace {
	u.LogicalBytes += sign * b.LogicalBytes
	if b.Put {
		u.PutBytes += sign * b.LogicalBytes
	}
	u.Builds += uint64(sign)
	return u
}

// changeUser adds a build to its user's sums, or with sign -1 subtracts it.
func changeUser(tx *bbolt.Tx, b *Brief, sign int64) error {
	key := binary.BigEndian.AppendUint32(nil, b.UID)
	v, err := get(tx, bucketUsers, key)
	if err != nil {
		return err
	}
	var u UserSpace
	decodeRow(v, &u) // zero without a row
	if u = u.with(b, sign); u.Builds == 0 {
		return drop(tx, bucketUsers, key)
	}
	return put(tx, bucketUsers, key, encodeRow(u))
}

// Users returns the sums of each user.
func (x *Index) Users(ctx context.Context) (map[uint32]UserSpace, error) {
	out := make(map[uint32]UserSpace)
	err := x.db.rows(ctx, bucketUsers, func(key, value []byte) error {
		var u UserSpace
		if len(key) != 4 || !decodeRow(value, &u) {
			return &DamageError{File: "index.db", Reason: "a user's space that is invalid"}
		}
		out[binary.BigEndian.Uint32(key)] = u
		return nil
	})
	return out, err
}
