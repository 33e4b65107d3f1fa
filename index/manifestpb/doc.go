// Package manifestpb holds the messages of a build's manifest, generated from index/manifest.proto.
//
// What their fields mean stands in the .proto; package index wraps them in the envelope that lies on disk.
package manifestpb
