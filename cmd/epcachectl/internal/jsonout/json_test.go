package jsonout

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/epcached/epcached/unixsock/wire"
)

func TestMessagesAsJSON(t *testing.T) {
	accounted := int64(7)
	for want, got := range map[string]Object{
		`{"at": "1970-01-01T00:00:01.5Z", "sequence": 18446744073709551615, "kind": "<a>"}`: Of(
			&wire.Event{AtMs: 1500, Sequence: 1<<64 - 1, Kind: "<a>"}, "at_ms", "sequence", "kind"),
		`{"id": "", "queued": null, "elapsed_seconds": 2.5, "estimate_seconds": 0}`: Of(
			&wire.Job{ElapsedMs: 2500}, "id", "queued_ms", "elapsed_ms", "estimate_ms"),
		`{"error": {"class": "BUSY", "text": "", "hint": "", "facts": {"a": "b"}}}`: Of(&wire.Job{
			Error: &wire.Error{Class: wire.ErrorClass_BUSY, Facts: map[string]string{"a": "b"}}},
			"error"),
		`{"error": null}`: Of(&wire.Job{}, "error"),
		`{"accounted_bytes": null, "name": "", "files": 0, "disk_bytes": 0}`: Of(&wire.SpaceLine{}),
		`{"accounted_bytes": 7}`: Of(&wire.SpaceLine{AccountedBytes: &accounted},
			"accounted_bytes"),
		`{"provider_options": {"E": {"k": "v"}}, "files": [], "session_options": {}}`: Of(
			&wire.AcquireReply{ProviderOptions: map[string]*wire.StringMap{
				"E": {Entries: map[string]string{"k": "v"}}}}, "provider_options", "files",
			"session_options"),
		`{"record": {"version": 1}}`: Of(&wire.AcquireReply{Record: `{"version":1}`}, "record"),
		`{"record": null}`:           Of(&wire.AcquireReply{}, "record"),
		`{"record": "{half"}`:        Of(&wire.AcquireReply{Record: "{half"}, "record"),
	} {
		text, err := json.Marshal(got)
		require.NoError(t, err)
		require.JSONEq(t, want, string(text))
	}
}

// A field in milliseconds is a time or one of the durations: a new one has to be put among these.
func TestEveryDurationIsKnown(t *testing.T) {
	messages := wire.File_epcached_proto.Messages()
	for i := range messages.Len() {
		fields := messages.Get(i).Fields()
		for j := range fields.Len() {
			name := fields.Get(j).Name()
			if !strings.HasSuffix(string(name), "_ms") {
				continue
			}
			require.Equal(t, protoreflect.Int64Kind, fields.Get(j).Kind(), name)
			times := []string{"at_ms", "since_ms", "created_ms", "last_used_ms", "judged_ms",
				"queued_ms", "started_ms", "first_ms", "last_ms", "retry_ms", "probed_ms",
				"previous_ms", "last_error_ms", "trust_expires_ms"}
			require.Contains(t, append(times, durations...), string(name))
		}
	}
}
