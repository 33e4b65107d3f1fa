package index

import (
	"path/filepath"

	"github.com/epcached/epcached/cas"
)

// Lower has the builds of read-only stores, layers, that look-ups also search. No account has them,
// and they are never removed or packed, but may be withheld. Its methods must be safe for
// concurrent use, and must not call the index.
type Lower interface {
	// Of returns the shared builds of a request, in the order in which they are considered.
	Of(RequestKey) []Build
	Get(BuildID) (Build, bool)
	// Each calls fn with all builds, in order of ids, and stops at its first error, which it
	// returns.
	Each(fn func(Build) error) error
	// Keep reports whether to keep the states of a build that this store does not have.
	Keep(BuildID) bool
}

// LayerManifest returns the manifest of a build of a layer, and sets the build's id, which is
// derived from it, so that two machines export equal files for the same build.
func LayerManifest(b *Build) ([]byte, error) {
	b.ID = BuildID{1}
	body, err := marshalBuild(*b)
	if err != nil {
		return nil, err
	}
	sum := cas.SumBytes(body)
	copy(b.ID[:], sum[:])
	return encodeManifest(*b)
}

// ManifestPath returns the path of a build's manifest in the store at dir.
func ManifestPath(dir string, id BuildID) string {
	return filepath.Join(dir, manifestsName, id.String()[:2], id.String())
}

// Manifests reads the manifests of a read-only store.
func Manifests(dir string) func(BuildID) (Build, error) {
	return newIndex(dir, Options{}).manifests.read
}
