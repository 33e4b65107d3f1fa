package cache

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/compilers"
)

// confined is a compiler that reports its sandbox.
type confined struct {
	compilers.Compiler
	measures []compilers.Safeguard
}

func (c *confined) Sandbox(context.Context) ([]compilers.Safeguard, error) {
	return c.measures, nil
}

func TestDoctorReportsTheSandbox(t *testing.T) {
	b := newBenchWith(t, func(o *Options) {
		o.Compiler = &confined{o.Compiler, []compilers.Safeguard{
			{Name: "files", InForce: true, Text: "they keep to their directory"},
			{Name: "memory", Text: "there is no cgroup", Hint: "give it one"},
		}}
	})
	list := b.doctor(b.self())
	require.Equal(t, query.SeverityOK, adviceOn(t, list, "sandbox files").Severity)
	missing := adviceOn(t, list, "sandbox memory")
	require.Equal(t,
		query.Advice{Severity: query.SeverityWarning, Subject: "sandbox memory",
			Text: "there is no cgroup", Hint: "give it one"}, missing)
}
