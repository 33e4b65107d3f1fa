package index

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/epcached/epcached/index/manifestpb"
)

// maxSourceWhy bounds the text that says why a source is not kept.
const maxSourceWhy = 200

func marshalSource(s Source) *manifestpb.Source {
	m := &manifestpb.Source{Kind: s.Kind, Why: s.Why}
	switch s.Kind {
	case SourceReference:
		m.Files = append(m.Files, &manifestpb.SourceFile{Path: []byte(s.Path)})
		for _, location := range slices.Sorted(maps.Keys(s.External)) {
			m.Files = append(m.Files,
				&manifestpb.SourceFile{Location: location, Path: []byte(s.External[location])})
		}
	case SourceCopy:
		for _, f := range s.Files {
			m.Files = append(m.Files,
				&manifestpb.SourceFile{Location: f.Name, Size: f.Size, Digest: f.Digest[:]})
		}
	default:
		if s.Why == "" {
			return nil
		}
	}
	return m
}

// unmarshalSource returns no source for a kind of a newer epcached, because the build is valid
// without it.
func unmarshalSource(m *manifestpb.Source) (Source, error) {
	s := Source{Kind: m.GetKind(), Why: m.GetWhy()}
	switch s.Kind {
	case SourceReference:
		for i, f := range m.Files {
			switch {
			case i == 0 && f.Location == "":
				s.Path = string(f.Path)
				continue
			case s.External == nil:
				s.External = make(map[string]string)
			}
			s.External[f.Location] = string(f.Path)
		}
	case SourceCopy:
		for _, f := range m.Files {
			file := File{Name: f.Location, Size: f.Size}
			if err := fixed("source.files.digest", file.Digest[:], f.Digest); err != nil {
				return Source{}, err
			}
			s.Files = append(s.Files, file)
		}
	default:
		return Source{Why: s.Why}, nil
	}
	return s, nil
}

// checkSource refuses sources that would not be read back unchanged.
func checkSource(s Source) error {
	if s.Kind != "" && s.Why != "" || len(s.Why) > maxSourceWhy || !utf8.ValidString(s.Why) {
		return fmt.Errorf(
			"a build with a source has a reason why it has none, or the reason has %d bytes",
			len(s.Why))
	}
	switch s.Kind {
	case "":
		return nil
	case SourceReference:
		return checkReference(s)
	case SourceCopy:
		return checkCopy(s)
	}
	return fmt.Errorf("unknown kind %.80q", s.Kind)
}

func checkReference(s Source) error {
	if !absolute(s.Path) {
		return fmt.Errorf("path %.80q is not absolute and clean", s.Path)
	}
	if len(s.External) > maxFiles || len(s.Files) > 0 {
		return fmt.Errorf("%d files of external data, and %d copies", len(s.External), len(s.Files))
	}
	for location, path := range s.External {
		if location == "" || !utf8.ValidString(location) || !absolute(path) {
			return fmt.Errorf("external data %.80q: path %.80q is not absolute and clean",
				location, path)
		}
	}
	return nil
}

func checkCopy(s Source) error {
	if len(s.Files) == 0 || len(s.Files) > maxFiles || s.Path != "" || len(s.External) > 0 {
		return fmt.Errorf("%d copies, not 1 to %d", len(s.Files), maxFiles)
	}
	seen := make(map[string]bool, len(s.Files))
	for i, f := range s.Files {
		if (f.Name == "") != (i == 0) || seen[f.Name] || f.Size < 0 || !utf8.ValidString(f.Name) {
			return fmt.Errorf(
				"copy %d, of external data %.80q: not the graph first, or not distinct", i, f.Name)
		}
		seen[f.Name] = true
	}
	return nil
}

func absolute(path string) bool {
	return filepath.IsAbs(path) && filepath.Clean(path) == path && !strings.ContainsRune(path, 0)
}
