package identity

import (
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
)

func anyRecord(t *rapid.T) Record {
	text := rapid.StringN(0, 8, -1)
	strings := func(name string) map[string]string {
		return rapid.MapOfN(text, text, 0, 3).
			Draw(t, name)
	}
	numbers := func(name string) map[string]int64 {
		return rapid.MapOfN(text, rapid.Int64(), 0, 3).
			Draw(t, name)
	}
	c := Record{Version: recordVersion, Embed: rapid.Bool().Draw(t, "embed"),
		Route: text.Draw(t, "route"),
		Session: compilers.Session{GraphOptimizationLevel: text.Draw(t, "level"),
			SessionOptions: strings("session"), FreeDimensions: numbers("dimensions"),
			FreeDimensionsByDenotation: numbers("denotations")}}
	copy(c.Model[:], rapid.SliceOfN(rapid.Byte(), len(cas.Digest{}), len(cas.Digest{})).
		Draw(t, "model"))
	if rapid.Bool().Draw(t, "output") {
		c.Output = &RecordOutput{text.Draw(t, "file"), rapid.Int64().Draw(t, "threshold"),
			rapid.Bool().Draw(t, "in the source")}
	}
	for range rapid.IntRange(0, 3).Draw(t, "eps") {
		ep := RecordEP{Name: text.Draw(t, "name"), Options: strings("options"),
			Files: strings("files"), Devices: []RecordDevice{}}
		for range rapid.IntRange(0, 2).Draw(t, "devices") {
			d := RecordDevice{Type: text.Draw(t, "type"),
				VendorID: rapid.Uint32().Draw(t, "vendor"),
				DeviceID: rapid.Uint32().Draw(t, "device")}
			if m := strings("metadata"); len(m) > 0 {
				d.Metadata = m
			}
			ep.Devices = append(ep.Devices, d)
		}
		c.EPs = append(c.EPs, ep)
	}
	return c
}

func TestRecordsAreReadAsTheyWereWritten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := anyRecord(t)
		got, err := Decode(c.Encode())
		require.NoError(t, err)
		require.Equal(t, c, got)
	})
}

func FuzzRecord(f *testing.F) {
	c := Record{Version: recordVersion,
		EPs: []RecordEP{{Name: "EP", Devices: []RecordDevice{{Type: "CPU"}},
			Options: map[string]string{"a": "1"}}}}
	f.Add(c.Encode())
	f.Fuzz(func(t *testing.T, record []byte) {
		if c, err := Decode(record); err == nil {
			require.Equal(t, record, c.Encode(), "another record has another key")
		}
	})
}

func TestRecordsOfOthersAreRefused(t *testing.T) {
	c := Record{Version: recordVersion,
		Session: compilers.Session{SessionOptions: map[string]string{"a": "1", "b": "2"}}}
	whole := c.Encode()
	later := Record{Version: recordVersion + 1}
	for name, record := range map[string][]byte{
		"empty":                   nil,
		"cut off":                 whole[:len(whole)-1],
		"of a later version":      later.Encode(),
		"with an unknown field":   appendBytes(whole, 15, []byte("new")),
		"with a field of its end": append(whole[:len(whole):len(whole)], 0x7d),
		"in another order": append(appendStrings(nil, 4, map[string]string{"z": "1"}),
			whole...),
	} {
		_, err := Decode(record)
		require.ErrorContains(t, err, "request record", name)
	}
}

func TestFilesOfOptionsAreNotKept(t *testing.T) {
	c := Record{EPs: []RecordEP{{Name: "EP", Files: map[string]string{"config": "digest"}}}}
	_, err := c.Terms()
	require.ErrorContains(t, err, `"config"`)
}

func TestCanonicalRecordIsFrozen(t *testing.T) {
	c := Record{Version: 1,
		EPs: []RecordEP{{Name: "EP",
			Devices: []RecordDevice{{Type: "CPU", VendorID: 1, DeviceID: 2}},
			Options: map[string]string{"b": "2", "a": "1"}}},
		Session: compilers.Session{SessionOptions: map[string]string{"k": "v"},
			FreeDimensions: map[string]int64{"n": 3}, GraphOptimizationLevel: "all"}, Embed: true,
		Route: "compile_api"}
	// Worked out by hand from manifestpb.Request: a change here makes every stored build
	// unreachable.
	want := "0801" + "1220" + hex.EncodeToString(make([]byte, 32)) +
		"1a1f" + "0a024550" + "12090a03435055" + "1001" + "1802" + "1a060a0161120131" +
		"1a060a0162120132" +
		"2206" + "0a016b120176" + "2a05" + "0a016e1003" + "3a03616c6c" + "4001" + "4a0b" +
		hex.EncodeToString([]byte("compile_api"))
	require.Equal(t, want, hex.EncodeToString(c.Encode()))
}
