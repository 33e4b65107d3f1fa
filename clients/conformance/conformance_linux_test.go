package conformance

import (
	"flag"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// The slow rows wait and do not compute: they may all run at the same time, whatever the number of
// processors.
func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "32"); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// TestClients runs every client through every row.
func TestClients(t *testing.T) {
	rows := readRows(t)
	for _, c := range clients {
		t.Run(c.name, func(t *testing.T) {
			if !c.alone {
				t.Parallel()
			}
			rows := c.rows(t, rows)
			command := c.command(t)
			quick := startDriver(t, command)
			// what it keeps open from the start is open from here on
			quick.ask(question{Do: "forget"})
			for _, r := range rows {
				if !r.Slow {
					runRow(t, quick, r)
				}
			}
			t.Run("slow", func(t *testing.T) {
				for _, r := range rows {
					if r.Slow {
						runSlow(t, command, r)
					}
				}
			})
		})
	}
}

// rows are those that hold for the client. One that it is without has to be there.
func (c client) rows(t *testing.T, all []row) []row {
	t.Helper()
	left := slices.DeleteFunc(slices.Clone(all),
		func(r row) bool { return c.without[r.Name] != "" })
	require.Len(t, left, len(all)-len(c.without),
		"a row that this client is to be without is not in the list")
	return left
}

func runSlow(t *testing.T, command []string, r row) {
	t.Run(r.Name, func(t *testing.T) {
		t.Parallel()
		d := startDriver(t, command)
		d.ask(question{Do: "forget"})
		d.pass(t, r)
	})
}

func runRow(t *testing.T, d *driver, r row) {
	t.Run(r.Name, func(t *testing.T) {
		for _, one := range r.cuts(t, frameSize) {
			d.pass(t, one)
		}
	})
}

// frameSize is that of the frame of a step, as a client's first request has it.
func frameSize(s step) int {
	e, err := new(daemon).envelope(&s)
	if err != nil {
		return 0
	}
	e.Request = 1
	s.Cut = nil
	data, err := s.frame(e)
	if err != nil {
		return 0
	}
	return len(data)
}

// pass plays the row to the client, and compares.
func (d *driver) pass(t *testing.T, r row) {
	t.Helper()
	before := d.descriptors()
	daemon := startDaemon(t, r)
	do := r.Do
	if do == "" {
		do = "acquire"
	}
	timeout := r.TimeoutMs
	if timeout == 0 {
		timeout = 20_000
	}
	q := question{Do: do, Socket: daemon.path, Model: daemon.file, Options: r.Options,
		Adopt: r.Adopt, TimeoutMs: timeout}
	if !r.Hurried {
		// on a busy machine this daemon takes longer than an application would wait
		q.HelloMs = 20_000
	}
	var a answer
	for range max(1, r.Times) {
		a = d.ask(q)
	}
	d.ask(question{Do: "forget"})
	connections := daemon.stop()

	if len(r.Want.Error) > 0 {
		require.Contains(t, r.Want.Error, a.Error, "%s: %+v", r.Name, a)
		require.Contains(t, a.Text, r.Want.Text, r.Name)
	} else {
		require.Empty(t, a.Error, "%s: %s", r.Name, a.Text)
		require.Equal(t, r.Want.Outcome, a.Outcome, r.Name)
		require.Equal(t, r.Want.Content, a.Content, r.Name)
		if len(r.Want.Phases) > 0 {
			require.Equal(t, r.Want.Phases, a.Phases, r.Name)
		}
	}
	if r.AtMost > 0 {
		require.LessOrEqual(t, connections, r.AtMost, "%s: connections", r.Name)
	}
	require.Equal(t, before, d.descriptors(),
		"%s: the client has left descriptors open, or closed what is not its own", r.Name)
}
