package epmodel

import (
	"path"
	"slices"
	"strings"
	"unicode/utf8"
)

// maxPath is PATH_MAX: nothing longer can be opened.
const maxPath = 4096

// memoryTag is what ORT writes as location for tensors that live in its own memory; offset is then an address. In a file it is an
// attempt to make ORT read arbitrary memory.
const memoryTag = "_ORT_MEM_ADDR_"

// badLocation returns what is wrong with an external data location, "" if nothing is. Every spelling of a file below the
// model's folder passes, because ONNX Runtime opens them all: "./w.bin", "w//x", "w/../x". Separators and drive letters of
// Windows are refused where they could leave the folder there.
func badLocation(s string) string {
	slashed := path.Clean(strings.ReplaceAll(s, `\`, "/"))
	switch {
	case s == "" || path.Clean(s) == ".":
		return "names no file"
	case len(s) > maxPath:
		return "the name is too long"
	case !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return "the name holds control characters or is not UTF-8"
	case strings.Contains(s, memoryTag):
		return "refers to memory of the process, not to a file"
	case s[0] == '/' || s[0] == '\\' || len(s) > 1 && s[1] == ':':
		return "is absolute; it must be relative to the model's folder"
	case slashed == ".." || strings.HasPrefix(slashed, "../"):
		return "leaves the model's folder"
	case slices.Contains([]string{"", ".", ".."}, s[strings.LastIndex(s, "/")+1:]):
		return "is a folder's name"
	}
	return ""
}

// File is the name of the file that is meant, spelled in the one clean way. Where an EP leaves weights
// in the source model's external data, the name is the model's own spelling, such as "./w.bin". It has
// to open in the artefact, which has no directories but those of its files: therefore "s/../w.bin" stays
// as it is, and is refused.
func (r Reference) File() string {
	if r.Attribute != "weights_metadata_map" || slices.Contains(strings.Split(r.Name, "/"), "..") {
		return r.Name
	}
	return path.Clean(r.Name)
}

// badArtefactName is stricter: a reference inside an artefact must be the name of one of its files, spelled in the one clean way.
func badArtefactName(s string) string {
	if why := badLocation(s); why != "" {
		return strings.Replace(why, "the model's folder", "the artefact", 1)
	}
	if strings.Contains(s, `\`) || path.Clean(s) != s {
		return "is not a clean relative name"
	}
	return ""
}
