package cache

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers/standin"
)

func anyRecord(t *rapid.T) canonical {
	text := rapid.StringN(0, 8, -1)
	strings := func(name string) map[string]string { return rapid.MapOfN(text, text, 0, 3).Draw(t, name) }
	numbers := func(name string) map[string]int64 { return rapid.MapOfN(text, rapid.Int64(), 0, 3).Draw(t, name) }
	c := canonical{Version: recordVersion, Embed: rapid.Bool().Draw(t, "embed"), Route: text.Draw(t, "route"),
		GraphOptimizationLevel: text.Draw(t, "level"), SessionOptions: strings("session"),
		FreeDimensions: numbers("dimensions"), FreeDimensionsByDenotation: numbers("denotations")}
	copy(c.Model[:], rapid.SliceOfN(rapid.Byte(), len(cas.Digest{}), len(cas.Digest{})).Draw(t, "model"))
	if rapid.Bool().Draw(t, "output") {
		c.Output = &canonicalOutput{text.Draw(t, "file"), rapid.Int64().Draw(t, "threshold"), rapid.Bool().Draw(t, "in the source")}
	}
	for range rapid.IntRange(0, 3).Draw(t, "eps") {
		ep := canonicalEP{Name: text.Draw(t, "name"), Options: strings("options"), Files: strings("files"), Devices: []canonicalDevice{}}
		for range rapid.IntRange(0, 2).Draw(t, "devices") {
			d := canonicalDevice{Type: text.Draw(t, "type"), VendorID: rapid.Uint32().Draw(t, "vendor"), DeviceID: rapid.Uint32().Draw(t, "device")}
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
		got, err := decodeRecord(c.encode())
		require.NoError(t, err)
		require.Equal(t, c, got)
	})
}

func FuzzRecord(f *testing.F) {
	c := canonical{Version: recordVersion, EPs: []canonicalEP{{Name: "EP", Devices: []canonicalDevice{{Type: "CPU"}}, Options: map[string]string{"a": "1"}}}}
	f.Add(c.encode())
	f.Fuzz(func(t *testing.T, record []byte) {
		if c, err := decodeRecord(record); err == nil {
			require.Equal(t, record, c.encode(), "another record has another key")
		}
	})
}

func TestRecordsOfOthersAreRefused(t *testing.T) {
	c := canonical{Version: recordVersion, SessionOptions: map[string]string{"a": "1", "b": "2"}}
	whole := c.encode()
	later := canonical{Version: recordVersion + 1}
	for name, record := range map[string][]byte{
		"empty":                   nil,
		"cut off":                 whole[:len(whole)-1],
		"of a later version":      later.encode(),
		"with an unknown field":   appendBytes(whole, 15, []byte("new")),
		"with a field of its end": append(whole[:len(whole):len(whole)], 0x7d),
		"in another order":        append(appendStrings(nil, 4, map[string]string{"z": "1"}), whole...),
	} {
		_, err := decodeRecord(record)
		require.ErrorContains(t, err, "request record", name)
	}
}

// A build's record means the request that it was made for, however that was spelled.
func TestARecordMeansItsRequest(t *testing.T) {
	b := newBench(t)
	for name, change := range map[string]func(*Request){
		"plain":  func(*Request) {},
		"device": func(r *Request) { r.EPs[0].Devices = devices("cpu") },
		"options": func(r *Request) {
			r.EPs[0].Options = map[string]string{"level": "03", "fast": "True", "hardware": "sim-9"}
		},
		"session":    func(r *Request) { r.SessionOptions = map[string]string{"session.disable_quant_qdq": "True"} },
		"dimension":  func(r *Request) { r.FreeDimensions = map[string]int64{"n": 3} },
		"by meaning": func(r *Request) { r.FreeDimensionsByDenotation = map[string]int64{"n": 3} },
		"level":      func(r *Request) { r.GraphOptimizationLevel = "disable_all" },
		"embedded":   func(r *Request) { r.Embed = true },
		"route":      func(r *Request) { r.Route = "session_options" },
		"output":     func(r *Request) { r.Output = Output{InitializersFile: "rest.bin", InitializersThreshold: 9} },
		"in source":  func(r *Request) { r.Output = Output{InitializersInSource: true} },
		"complete":   func(r *Request) { r.Output = Output{Complete: true, NodeNamePrefix: "left_"} },
	} {
		t.Run(name, func(t *testing.T) {
			r := b.request(b.model(1))
			change(r)
			build := b.acquire(r).Build
			again, err := b.cache.requestOf(build)
			require.NoError(t, err)
			_, rc, err := b.cache.resolve(context.Background(), again, func(string) {})
			require.NoError(t, err)
			p, err := b.cache.plan(context.Background(), again, build.ModelDigest, rc, func(string) {})
			require.NoError(t, err)
			require.Equal(t, build.RequestKey, p.requestKey)
			require.Equal(t, build.BuildKey, p.buildKey)
			require.Equal(t, build.Record, p.record)
		})
	}
}

func TestFilesOfOptionsAreNotKept(t *testing.T) {
	c := canonical{EPs: []canonicalEP{{Name: standin.EP, Files: map[string]string{"config": "digest"}}}}
	_, err := c.again()
	require.ErrorContains(t, err, `"config"`)
}
