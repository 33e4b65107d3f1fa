package index

import (
	"path/filepath"

	"github.com/epcached/epcached/cas"
)

// Lower has the builds of read-only stores, layers, that look-ups go on in. They are in no account,
// and are never removed or packed. They may be marked as withheld. Its methods are called by any
// number of goroutines, and must not call the index.
type Lower interface {
	// Of returns the shared builds of a request, in the order in which they are considered.
	Of(RequestKey) []Build
	Get(BuildID) (Build, bool)
	// Each calls fn with all builds, in order of ids, and stops at its first error, which it
	// returns.
	Each(fn func(Build) error) error
	// Keep reports whether marks of a build are kept that this store does not have.
	Keep(BuildID) bool
}

// LayerManifest returns the manifest of a build of a layer, and gives the build the id that follows
// from it: two machines that export the same build write the same.
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

// ManifestPath is where a store in the directory has the manifest of a build.
func ManifestPath(dir string, id BuildID) string {
	return filepath.Join(dir, manifestsName, id.String()[:2], id.String())
}

// Manifests reads the manifests of a store that is only read.
func Manifests(dir string) func(BuildID) (Build, error) {
	return newIndex(dir, Options{}).manifests.read
}
