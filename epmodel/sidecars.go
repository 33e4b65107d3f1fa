package epmodel

import (
	"path"
	"slices"
	"strings"
	"unicode/utf8"
)

// compatibilityPrefix starts the metadata keys under which ORT keeps what an EP says of an artefact.
const compatibilityPrefix = "ep_compatibility_info."

// Locations are the external data files of the model, sorted, each once, as spelled in the model,
// and those of Whole. Read has checked them.
func (m *Model) Locations() []string {
	all := slices.Clone(m.Whole)
	for _, t := range m.Initializers {
		if t.Location != "" {
			all = append(all, t.Location)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// WrapsIR tells whether every EPContext node only names a model in OpenVINO's own format (IR), an
// .xml file with the weights in a .bin file beside it. Nothing of it is compiled: the execution
// provider compiles it each time it loads.
func (m *Model) WrapsIR() bool {
	other := func(c Context) bool { return !c.wrapsIR() }
	return len(m.Contexts) > 0 && !slices.ContainsFunc(m.Contexts, other)
}

func (c Context) wrapsIR() bool {
	return strings.HasPrefix(c.Source, "OpenVINO") && c.EmbedMode == 0 && c.MainContext == 1 &&
		c.DLCContext == "" && len(c.WeightLocations) == 0 && badLocation(c.CacheContext) == "" &&
		path.Ext(c.CacheContext) == ".xml" // OpenVINO loads .XML too, and cannot compile it
}

func isIR(name string) bool { return strings.EqualFold(path.Ext(name), ".xml") }

func weightsOfIR(name string) string { return strings.TrimSuffix(name, path.Ext(name)) + ".bin" }

func (m *Model) filesOfIR() (files []string) {
	for _, c := range m.Contexts {
		files = append(files, c.CacheContext, weightsOfIR(c.CacheContext))
	}
	slices.Sort(files)
	return slices.Compact(files)
}

// Sidecars lists every reference to a file outside the graph, in file order; the same file may come several times. Names are as
// written and not checked: Validate does that. Context binaries can refer to further files: see [BinaryReferences].
func (m *Model) Sidecars() []Reference {
	var refs []Reference
	for _, c := range m.Contexts {
		refs = append(refs, c.sidecars()...)
	}
	seen := map[string]bool{}
	for _, t := range m.Initializers {
		if t.Location != "" && !seen[t.Location] {
			seen[t.Location] = true
			refs = append(refs, Reference{Node: t.Name, Attribute: "external_data", Name: t.Location, Offset: t.At})
		}
	}
	return refs
}

func (c Context) sidecars() []Reference {
	var refs []Reference
	add := func(attribute, name string) {
		refs = append(refs, Reference{Node: c.Node, Attribute: attribute, Name: name, Offset: c.Offset})
	}
	if c.CacheContext != "" {
		add("ep_cache_context", c.CacheContext)
		if isIR(c.CacheContext) {
			add("ep_cache_context", weightsOfIR(c.CacheContext))
		}
	}
	if c.DLCContext != "" {
		add("ep_dlc_context", c.DLCContext)
	}
	for _, l := range c.WeightLocations {
		add("weights_metadata_map", l)
	}
	return refs
}

// CompatibilityInfo gives what each EP says of the artefact, for ORT to judge: EP name -> string. Only EPs that are the source of
// one of the nodes count: metadata of a source model survives compilation, so a string of another EP may be a left-over.
func (m *Model) CompatibilityInfo() map[string]string {
	info := map[string]string{}
	for _, c := range m.Contexts {
		if s, ok := m.Metadata[compatibilityPrefix+c.Source]; ok && c.Source != "" {
			info[c.Source] = s
		}
	}
	return info
}

const maxPath = 4096 // PATH_MAX: nothing longer can be opened

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
