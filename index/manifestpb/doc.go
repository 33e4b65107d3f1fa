// Package manifestpb holds the messages of a build's manifest, generated from index/manifest.proto.
//
// The .proto describes their fields; package index wraps them in the envelope that is on disk.
package manifestpb
