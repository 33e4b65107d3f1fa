package identity

import (
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/index"
)

// BuildKey returns the digest of the request key and of what else determines the build: for each
// execution provider its library's digest, SDK version, hardware architecture and compatibility
// string, and the route.
func BuildKey(key index.RequestKey, eps []index.EPFacts, route string) index.BuildKey {
	b := appendBytes(nil, 1, key[:])
	for _, ep := range eps {
		m := appendBytes(nil, 1, ep.LibraryDigest[:])
		m = appendBytes(m, 2, []byte(ep.SDKVersion))
		m = appendBytes(m, 3, []byte(ep.HardwareArchitecture))
		m = appendBytes(m, 4, []byte(ep.CompatibilityString))
		b = appendBytes(b, 2, m)
	}
	return index.BuildKey(blake3.Sum256(appendBytes(b, 3, []byte(route))))
}

// ForeignBuildKey returns the build key for libraries that the daemon does not run. It has fields
// that BuildKey's record has not, so that the two are never equal.
func ForeignBuildKey(key index.RequestKey, eps []index.EPFacts, route, ort string,
	here [32]byte) index.BuildKey {
	b := appendBytes(nil, 1, key[:])
	for _, ep := range eps {
		b = appendBytes(b, 2, appendBytes(nil, 1, ep.LibraryDigest[:]))
	}
	b = appendBytes(b, 3, []byte(route))
	b = appendBytes(b, 4, []byte(ort))
	return index.BuildKey(blake3.Sum256(appendBytes(b, 5, here[:])))
}
