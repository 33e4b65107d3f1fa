package portable

import (
	"fmt"
)

// Card describes one build without its files.
type Card struct {
	Raw      []byte
	Build    []byte // the build's manifest
	Digest   Digest // of that
	Manifest Manifest
	Config   *Config

	bundles    []*bundle // its signatures; none of them is verified yet
	signatures [][]byte  // their manifests
}

// maxSignatures bounds the signatures of one build, because earlier versions wrote several.
const maxSignatures = 4

// Name is what a bundle calls the card: an unsigned hint.
func (c *Card) Name() string { return "b-" + c.Config.BuildKey.String() }

// Signed reports whether there is a signature, valid or not.
func (c *Card) Signed() bool { return len(c.bundles) > 0 }

// Signers returns the ids of the keys whose signatures the card has, which are not verified.
func (c *Card) Signers() (ids []string) {
	for _, b := range c.bundles {
		ids = append(ids, b.Material.PublicKey.Hint)
	}
	return ids
}

// Blobs returns the digests of all blobs of the build and of the card.
func (c *Card) Blobs() []Digest {
	all := []Digest{DigestOf(c.Raw), c.Digest, c.Manifest.Config.Digest}
	for _, d := range c.Manifest.Layers {
		all = append(all, d.Digest)
	}
	for _, raw := range c.signatures {
		var m Manifest
		if decode("signature", raw, maxCard, &m) == nil { // cannot fail: it was decoded before
			all = append(all, DigestOf(raw), m.Config.Digest, m.Layers[0].Digest)
		}
	}
	return all
}

// fileLayers returns the layers that are the build's files, in the order of Config.Files.
func (m *Manifest) fileLayers() (out []*Descriptor) {
	for i := range m.Layers {
		if m.Layers[i].MediaType == MediaFile {
			out = append(out, &m.Layers[i])
		}
	}
	return out
}

// Layer is a file of a build with its layers.
type Layer struct {
	File   File
	Blob   Descriptor
	Chunks *Descriptor // nil if there is no chunk list
}

// ParseLayers reads the manifest of a build, for a reader that trusts its source.
func ParseLayers(file string, manifest []byte) (all []Layer, err error) {
	c := &Card{Digest: DigestOf(manifest)}
	if err := c.readBuild(file, manifest); err != nil {
		return nil, err
	}
	for i := range c.Manifest.Layers {
		switch d := &c.Manifest.Layers[i]; {
		case d.MediaType == MediaFile:
			all = append(all, Layer{File: c.Config.Files[len(all)], Blob: *d})
		case d.MediaType == MediaChunks && len(all) > 0:
			all[len(all)-1].Chunks = d
		}
	}
	return all, nil
}

// newManifest makes the manifest of a build. The layers are those of its files, in their order.
func newManifest(c *Config, layers []Descriptor) *Manifest {
	return &Manifest{SchemaVersion: 2, MediaType: MediaManifest, ArtifactType: ArtifactBuild,
		Config: descriptorOf(MediaConfig, encode(c)), Layers: layers}
}

// newCard makes a card of the encoded manifests of a build and of its signatures.
func newCard(build []byte, signatures ...[]byte) []byte {
	x := index{SchemaVersion: 2, MediaType: MediaIndex, ArtifactType: ArtifactCard}
	x.Manifests = append(x.Manifests, descriptorOf(MediaManifest, build))
	x.Manifests[0].ArtifactType = ArtifactBuild
	for _, s := range signatures {
		d := descriptorOf(MediaManifest, s)
		d.ArtifactType = MediaBundle
		x.Manifests = append(x.Manifests, d)
	}
	return encode(&x)
}

// ParseCard reads a card. Every byte of it is checked against the others; who wrote it is not: see
// Trust.Verify.
func ParseCard(file string, raw []byte) (*Card, error) {
	var x index
	if err := decode(file, raw, maxCard, &x); err != nil {
		return nil, err
	}
	switch {
	case x.SchemaVersion != 2 || x.MediaType != MediaIndex:
		return nil, wrong(file, "mediaType", "%.80q, schema %d: not an image index", x.MediaType,
			x.SchemaVersion)
	case x.ArtifactType != ArtifactCard:
		return nil, wrong(file, "artifactType", "%.80q, not %q", x.ArtifactType, ArtifactCard)
	case len(x.Manifests) == 0 || len(x.Manifests) > 1+maxSignatures:
		return nil, wrong(file, "manifests", "%d, not 1 to %d", len(x.Manifests), 1+maxSignatures)
	}
	c := &Card{Raw: raw, Digest: x.Manifests[0].Digest}
	for i := range x.Manifests {
		d, field, artifact := &x.Manifests[i], fmt.Sprintf("manifests[%d]", i), MediaBundle
		if i == 0 {
			artifact = ArtifactBuild
		}
		if d.ArtifactType != artifact || len(d.Annotations) > 0 {
			return nil, wrong(file, field, "artifactType %.80q, not %q, or annotations",
				d.ArtifactType, artifact)
		}
		data, err := d.inline(file, field, MediaManifest)
		if err != nil {
			return nil, err
		}
		if i == 0 {
			err = c.readBuild(file+": "+field, data)
		} else {
			err = c.readSignature(file+": "+field, data)
		}
		if err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (c *Card) readBuild(file string, raw []byte) error {
	c.Build = raw
	m := &c.Manifest
	if err := decode(file, raw, maxCard, m); err != nil {
		return err
	}
	if err := m.check(file, ArtifactBuild); err != nil {
		return err
	}
	data, err := m.Config.inline(file, "config", MediaConfig)
	if err == nil {
		c.Config, err = ParseConfig(file+": config", data)
	}
	if err != nil {
		return err
	}
	layers := m.fileLayers()
	if len(layers) != len(c.Config.Files) || m.Subject != nil {
		return wrong(file, "layers", "%d are files, and the config has %d files; or a subject",
			len(layers), len(c.Config.Files))
	}
	for i, d := range layers {
		title := c.Config.Files[i].Name + titleSuffix
		if d.Annotations[annotationTitle] != title || d.Size <= 0 || len(d.Data) > 0 {
			return wrong(file, fmt.Sprintf("layers[%d]", i),
				"title %.80q, not %q; size %d; or with data",
				d.Annotations[annotationTitle], title, d.Size)
		}
	}
	return nil
}

// readSignature reads the manifest of a signature. Its only layer is a sigstore bundle.
func (c *Card) readSignature(file string, raw []byte) error {
	var m Manifest
	if err := decode(file, raw, maxCard, &m); err != nil {
		return err
	}
	if err := m.check(file, MediaBundle); err != nil {
		return err
	}
	if _, err := m.Config.inline(file, "config", MediaEmpty); err != nil {
		return err
	}
	switch {
	case m.Subject == nil || m.Subject.Digest != c.Digest:
		return wrong(file, "subject", "it is not the build's manifest")
	case len(m.Layers) != 1:
		return wrong(file, "layers", "%d, not 1", len(m.Layers))
	}
	data, err := m.Layers[0].inline(file, "layers[0]", MediaBundle)
	if err != nil {
		return err
	}
	b, err := parseBundle(file+": layers[0]", data, maxCard, payloadType)
	if err != nil {
		return err
	}
	c.bundles, c.signatures = append(c.bundles, b), append(c.signatures, raw)
	return nil
}
