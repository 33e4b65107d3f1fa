package index

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index/journalfile"
	"github.com/epcached/epcached/index/manifestpb"
)

// A manifest file; numbers are little-endian.
//
//	offset  size  what
//	0       8     magic "epcmanif"
//	8       4     version of the format, 1
//	12      4     n, the length of the body, at most 16 MiB
//	16      n     manifestpb.Manifest
//	16+n    32    BLAKE3 of all before
const (
	manifestMagic   = "epcmanif"
	formatVersion   = journalfile.FormatVersion
	headerSize      = 16
	manifestSumSize = 32
	maxManifest     = 16 << 20 // of the body; the largest real ones have some 100 KiB
	maxFiles        = 1 << 14
)

// encodeManifest returns the whole file.
func encodeManifest(b Build) ([]byte, error) {
	body, err := marshalBuild(b)
	if err != nil {
		return nil, err
	}
	return sealManifest(formatVersion, body), nil
}

func sealManifest(version uint32, body []byte) []byte {
	file := make([]byte, 0, headerSize+len(body)+manifestSumSize)
	file = append(file, manifestMagic...)
	file = binary.LittleEndian.AppendUint32(file, version)
	file = binary.LittleEndian.AppendUint32(file, uint32(len(body)))
	file = append(file, body...)
	sum := cas.SumBytes(file)
	return append(file, sum[:]...)
}

// decodeManifest reads a whole file. The error is a *NewerError or a
// *DamageError that names it.
func decodeManifest(name string, file []byte) (Build, error) {
	body, err := openManifest(name, file)
	if err != nil {
		return Build{}, err
	}
	b, err := unmarshalBuild(body)
	if err != nil {
		return Build{}, &DamageError{File: name, Reason: err.Error()}
	}
	return b, nil
}

// openManifest checks the bytes around the body. The version comes before
// the checksum, which a newer format may have elsewhere.
func openManifest(name string, file []byte) ([]byte, error) {
	if len(file) < headerSize || string(file[:8]) != manifestMagic {
		return nil, &DamageError{File: name, Reason: "it does not begin as a manifest does"}
	}
	if v := binary.LittleEndian.Uint32(file[8:]); v > formatVersion {
		return nil, &NewerError{File: name, Version: v}
	} else if v == 0 {
		return nil, &DamageError{File: name, Reason: "format 0"}
	}
	n := int64(binary.LittleEndian.Uint32(file[12:]))
	if n > maxManifest || int64(len(file)) != headerSize+n+manifestSumSize {
		return nil, &DamageError{File: name, Reason: fmt.Sprintf("%d bytes, its header says %d",
			len(file), headerSize+n+manifestSumSize)}

	}
	if sum := cas.SumBytes(file[:headerSize+n]); !bytes.Equal(sum[:], file[headerSize+n:]) {
		return nil, &DamageError{File: name, Reason: "wrong checksum"}
	}
	return file[headerSize : headerSize+n], nil
}

func marshalBuild(b Build) ([]byte, error) {
	if err := checkBuild(b); err != nil {
		return nil, err
	}
	m := &manifestpb.Manifest{
		Id: b.ID[:], RequestKey: b.RequestKey[:], BuildKey: b.BuildKey[:], Scope: b.Scope,
		Uid: b.UID, ModelDigest: b.ModelDigest[:], ModelName: b.ModelName, Record: b.Record,
		RecordJson: b.RecordJSON, OrtVersion: b.ORTVersion, Route: b.Route, Graph: b.Graph,
		SessionOptions: b.SessionOptions, GraphOptimizationLevel: b.GraphOptimizationLevel,
		CompileSeconds: b.CompileSeconds, Created: nanos(b.Created), LoadCheck: b.LoadCheck,
		IrVersion: b.IRVersion, Embed: b.Embed, Warnings: b.Warnings, Put: b.Put,
		VerifiedOutput: b.VerifiedOutput, ModelPath: b.ModelPath,
	}
	if o := b.Converted; !o.ID.IsZero() {
		m.Converted = &manifestpb.Origin{BuildId: o.ID[:], BuildKey: o.BuildKey[:],
			Created: nanos(o.Created)}
	}
	if i := b.Imported; i.Key != "" {
		m.Imported = &manifestpb.Imported{Key: i.Key, Manifest: i.Manifest[:], Builder: i.Builder,
			Remote: i.Remote}
	}
	for _, f := range b.Files {
		m.Files = append(m.Files, &manifestpb.File{Name: f.Name, Size: f.Size, Digest: f.Digest[:]})
	}
	for _, e := range b.EPs {
		m.Eps = append(m.Eps, &manifestpb.EP{
			Name: e.Name, Version: e.Version, Library: e.Library, LibraryDigest: e.LibraryDigest[:],
			SdkVersion: e.SDKVersion, HardwareArchitecture: e.HardwareArchitecture,
			CompatibilityString: e.CompatibilityString, DriverVersion: e.DriverVersion,
			Devices: e.Devices, TookNone: e.TookNone,
		})
	}
	m.Source, m.Members = marshalSource(b.Source), marshalMembers(b.Members)
	for ep, options := range b.ProviderOptions {
		if m.ProviderOptions == nil {
			m.ProviderOptions = make(map[string]*manifestpb.Options)
		}
		m.ProviderOptions[ep] = &manifestpb.Options{Values: options}
	}
	body, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err == nil && len(body) > maxManifest {
		err = fmt.Errorf("%d bytes, more than %d", len(body), maxManifest)
	}
	return body, err
}

func unmarshalBuild(body []byte) (Build, error) {
	var m manifestpb.Manifest
	if err := proto.Unmarshal(body, &m); err != nil {
		return Build{}, err
	}
	b := Build{
		Scope: m.Scope, UID: m.Uid, ModelName: m.ModelName, Record: m.Record,
		RecordJSON: m.RecordJson, ORTVersion: m.OrtVersion, Route: m.Route, Graph: m.Graph,
		SessionOptions: m.SessionOptions, GraphOptimizationLevel: m.GraphOptimizationLevel,
		CompileSeconds: m.CompileSeconds, Created: fromNanos(m.Created), LoadCheck: m.LoadCheck,
		IRVersion: m.IrVersion, Embed: m.Embed, Warnings: m.Warnings, Put: m.Put,
		VerifiedOutput: m.VerifiedOutput, ModelPath: m.ModelPath,
	}
	err := cmp.Or(fixed("id", b.ID[:], m.Id), fixed("request_key", b.RequestKey[:], m.RequestKey),
		fixed("build_key", b.BuildKey[:], m.BuildKey),
		fixed("model_digest", b.ModelDigest[:], m.ModelDigest))
	if o := m.Converted; o != nil {
		b.Converted.Created = fromNanos(o.Created)
		err = cmp.Or(err, fixed("converted.build_id", b.Converted.ID[:], o.BuildId))
		err = cmp.Or(err, fixed("converted.build_key", b.Converted.BuildKey[:], o.BuildKey))
	}
	if i := m.Imported; i != nil {
		b.Imported.Key, b.Imported.Builder, b.Imported.Remote = i.Key, i.Builder, i.Remote
		err = cmp.Or(err, fixed("imported.manifest", b.Imported.Manifest[:], i.Manifest))
	}
	for _, f := range m.Files {
		file := File{Name: f.Name, Size: f.Size}
		err = cmp.Or(err, fixed("files.digest", file.Digest[:], f.Digest))
		b.Files = append(b.Files, file)
	}
	for _, e := range m.Eps {
		facts := EPFacts{
			Name: e.Name, Version: e.Version, Library: e.Library, SDKVersion: e.SdkVersion,
			HardwareArchitecture: e.HardwareArchitecture,
			CompatibilityString:  e.CompatibilityString,
			DriverVersion:        e.DriverVersion, Devices: e.Devices, TookNone: e.TookNone,
		}
		err = cmp.Or(err, fixed("eps.library_digest", facts.LibraryDigest[:], e.LibraryDigest))
		b.EPs = append(b.EPs, facts)
	}
	for ep, options := range m.ProviderOptions {
		if b.ProviderOptions == nil {
			b.ProviderOptions = make(map[string]map[string]string)
		}
		b.ProviderOptions[ep] = options.GetValues()
	}
	var bad error
	if b.Source, bad = unmarshalSource(m.Source); bad == nil {
		b.Members, bad = unmarshalMembers(m.Members)
	}
	if err = cmp.Or(err, cmp.Or(bad, checkBuild(b))); err != nil {
		return Build{}, err
	}
	return b, nil
}

// checkBuild refuses invalid builds, when they are written and when they are read, because their
// names become names of files.
func checkBuild(b Build) error {
	switch {
	case b.ID.IsZero():
		return fmt.Errorf("no build id")
	case !validScope(b.Scope):
		return fmt.Errorf("scope %.80q is neither shared nor that of a user", b.Scope)
	case len(b.Files) == 0 || len(b.Files) > maxFiles:
		return fmt.Errorf("%d files, not 1 to %d", len(b.Files), maxFiles)
	}
	if err := checkSource(b.Source); err != nil {
		return fmt.Errorf("source: %w", err)
	}
	names := make(map[string]bool, len(b.Files))
	for _, f := range b.Files {
		switch {
		case !fs.ValidPath(f.Name) || f.Name == "." || strings.ContainsRune(f.Name, 0) ||
			names[f.Name]:
			return fmt.Errorf("file name %.80q is not clean, relative and distinct", f.Name)
		case f.Size < 0:
			return fmt.Errorf("file %q: size %d", f.Name, f.Size)
		}
		names[f.Name] = true
	}
	if !names[b.Graph] {
		return fmt.Errorf("graph %.80q is not among the files", b.Graph)
	}
	return checkMembers(&b, names)
}

func validScope(scope string) bool {
	if scope == "shared" {
		return true
	}
	digits, ok := strings.CutPrefix(scope, "uid:")
	if !ok {
		return false
	}
	uid, err := strconv.ParseUint(digits, 10, 32)
	return err == nil && strconv.FormatUint(uid, 10) == digits // one spelling for each user
}

func fixed(field string, to, from []byte) error {
	if len(from) != len(to) {
		return fmt.Errorf("%s has %d bytes, not %d", field, len(from), len(to))
	}
	copy(to, from)
	return nil
}

// optional copies a field of fixed length, unless it is missing.
func optional(field string, to, from []byte) error {
	if len(from) == 0 {
		return nil
	}
	return fixed(field, to, from)
}

// nanos and fromNanos preserve the zero time, which has no number of nanoseconds.
func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func fromNanos(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n).UTC()
}

// shorten makes s valid UTF-8 of at most limit bytes, because it may be a vendor's message.
func shorten(s string, limit int) string {
	if len(s) > limit {
		s = s[:limit]
	}
	return strings.ToValidUTF8(s, "")
}
