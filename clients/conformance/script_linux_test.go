package conformance

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// row is one thing that a daemon may do, and what every client makes of it.
type row struct {
	Name string `json:"name"`
	// "": yes; "none", "refused", "not a socket", "full", "stopped", "not allowed"
	Listen string `json:"listen"`
	// what is done on the first, the second, ...; the last is that of all further ones
	Connections [][]step `json:"connections"`
	Do          string   `json:"do"`         // "acquire" (the default) or "jobs"
	Times       int      `json:"times"`      // how often it is asked, by one client; 0: once
	Options     int      `json:"options"`    // bytes of a provider option: makes the request large
	Adopt       bool     `json:"adopt"`      // what the Acquire has to say
	TimeoutMs   int      `json:"timeout_ms"` // the caller's; 0: 20 s
	// it is about the time limit for a first answer, which else no client has to keep while other
	// tests run
	Hurried bool `json:"hurried"`
	Slow    bool `json:"slow"` // it takes a client's time limits to be found out
	Want    want `json:"want"`
	AtMost  int  `json:"at_most"` // connections; 0: any number
}

// want is what the last request comes to.
type want struct {
	Outcome string   `json:"outcome,omitempty"`
	Content string   `json:"content,omitempty"` // of the graph, read through the view's descriptor
	Phases  []string `json:"phases,omitempty"`
	Error   []string `json:"error,omitempty"` // any of these classes
	Text    string   `json:"text,omitempty"`  // a part of the error's text
}

// step is one thing done on a connection. In the rows it is an object, or only the name of one
// without arguments.
type step struct {
	Do       string         `json:"do"` // see daemon.go
	Envelope map[string]any `json:"envelope"`
	With     map[string]any `json:"with"` // fields of a hit's reply; null takes one out
	Fds      []string       `json:"fds"`  // "view", "file": what travels with the frame
	// how often fds are repeated, or the frame sent; 0: once
	Times int `json:"times"`
	// descriptors that the frame says it has; none: as many as travel
	Announce *int    `json:"announce"`
	FdsAt    int     `json:"fds_at"` // the byte with which they travel
	Number   *uint64 `json:"number"` // the request's; none: that of the last request
	Cut      *int    `json:"cut"`    // the frame is sent up to this byte; negative: from its end
	// the row is run once for each byte at which the frame can be cut
	CutEach bool    `json:"cut_each"`
	Length  *uint32 `json:"length"` // what the frame's length says
	Extra   string  `json:"extra"`  // appended to the message: hexadecimal
	Hex     string  `json:"hex"`
	Every   int     `json:"every_ms"` // sends byte by byte, with this pause
	Ms      int     `json:"ms"`
}

func (s *step) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '"' {
		return json.Unmarshal(data, &s.Do)
	}
	type plain step
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	return dec.Decode((*plain)(s))
}

func readRows(t *testing.T) []row {
	t.Helper()
	data, err := os.ReadFile("testdata/rows.json")
	require.NoError(t, err)
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	var rows []row
	require.NoError(t, dec.Decode(&rows))
	names := map[string]bool{}
	for _, r := range rows {
		require.NotEmpty(t, r.Name)
		require.False(t, names[r.Name], "two rows have the name %q", r.Name)
		require.True(t, r.Want.Outcome != "" ||
			len(r.Want.Error) > 0, "%s: nothing is wanted of the client", r.Name)
		names[r.Name] = true
	}
	return rows
}

// cuts returns the row once for each byte at which the frame that it marks can be cut.
func (r row) cuts(t *testing.T, size func(step) int) []row {
	t.Helper()
	for i, steps := range r.Connections {
		for j, s := range steps {
			if !s.CutEach {
				continue
			}
			var all []row
			for at := range size(s) {
				one := r
				one.Name = fmt.Sprintf("%s, byte %d", r.Name, at)
				one.Connections = append([][]step(nil), r.Connections...)
				one.Connections[i] = append([]step(nil), steps...)
				one.Connections[i][j].Cut = &at
				all = append(all, one)
			}
			require.NotEmpty(t, all)
			return all
		}
	}
	return []row{r}
}
