package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
)

// Fields of ONNX messages, as far as tests change compiled graphs.
const (
	modelGraph      protowire.Number = 7
	modelMetadata   protowire.Number = 14
	graphNode       protowire.Number = 1
	nodeAttribute   protowire.Number = 5
	attributeName   protowire.Number = 1
	attributeString protowire.Number = 4
	entryKey        protowire.Number = 1
	entryValue      protowire.Number = 2
)

// rewrite copies a message, and has change replace the value of each of its fields with this
// number. A nil value leaves the field out.
func rewrite(t testing.TB, message []byte, number protowire.Number,
	change func(value []byte) []byte) []byte {
	t.Helper()
	var out []byte
	for rest := message; len(rest) > 0; {
		num, kind, n := protowire.ConsumeField(rest)
		require.GreaterOrEqual(t, n, 0, "no protocol buffer")
		field := rest[:n]
		rest = rest[n:]
		if num != number || kind != protowire.BytesType {
			out = append(out, field...)
			continue
		}
		_, _, tag := protowire.ConsumeTag(field)
		value, _ := protowire.ConsumeBytes(field[tag:])
		if value = change(value); value != nil {
			out = protowire.AppendBytes(protowire.AppendTag(out, num, protowire.BytesType), value)
		}
	}
	return out
}

// fieldOf returns the bytes of the message's first field with this number.
func fieldOf(t testing.TB, message []byte, number protowire.Number) (found []byte) {
	t.Helper()
	rewrite(t, message, number, func(value []byte) []byte {
		if found == nil {
			found = value
		}
		return value
	})
	return found
}

// withAttribute returns the graph with another text in this attribute of each of its nodes.
func withAttribute(t testing.TB, model []byte, name string, change func(old string) string) []byte {
	t.Helper()
	changed := false
	out := rewrite(t, model, modelGraph, func(graph []byte) []byte {
		return rewrite(t, graph, graphNode, func(node []byte) []byte {
			return rewrite(t, node, nodeAttribute, func(attribute []byte) []byte {
				if string(fieldOf(t, attribute, attributeName)) != name {
					return attribute
				}
				return rewrite(t, attribute, attributeString, func(old []byte) []byte {
					changed = true
					return []byte(change(string(old)))
				})
			})
		})
	})
	require.True(t, changed, "no node has the attribute %q", name)
	return out
}

// withoutMetadata returns the model without the metadata with a key that begins so; it need not
// have any.
func withoutMetadata(t testing.TB, model []byte, prefix string) []byte {
	t.Helper()
	return rewrite(t, model, modelMetadata, func(entry []byte) []byte {
		if bytes.HasPrefix(fieldOf(t, entry, entryKey), []byte(prefix)) {
			return nil
		}
		return entry
	})
}

// withMetadata returns the model with one more entry of metadata.
func withMetadata(model []byte, key, value string) []byte {
	entry := protowire.AppendString(protowire.AppendTag(nil, entryKey, protowire.BytesType), key)
	entry = protowire.AppendString(protowire.AppendTag(entry, entryValue, protowire.BytesType),
		value)
	return protowire.AppendBytes(protowire.AppendTag(bytes.Clone(model), modelMetadata,
		protowire.BytesType), entry)
}

// metadataOf returns the value of an entry, "" where there is none.
func metadataOf(t testing.TB, model []byte, key string) (found string) {
	t.Helper()
	rewrite(t, model, modelMetadata, func(entry []byte) []byte {
		if string(fieldOf(t, entry, entryKey)) == key {
			found = string(fieldOf(t, entry, entryValue))
		}
		return entry
	})
	return found
}
