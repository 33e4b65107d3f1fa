package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

// Real builds are compared with their models: as they are made, and later.
func TestRealOutputIsVerified(t *testing.T) {
	for name, real := range realProviders {
		t.Run(name, func(t *testing.T) {
			d := newSite(t, runtimeFolder(t, real.runtime)).start(t)
			c := d.dial()
			verify := func(r *wire.Acquire) { r.VerifyOutput = 0.01 }
			first := writeModel(t, t.TempDir(), 1)
			a := get(t, c, first, with(real.provider), verify)
			require.Equal(t, "compiled", a.Outcome)
			require.Empty(t, a.Warnings)
			builds := d.list()
			require.Len(t, builds, 1)
			require.Equal(t, 0.01, builds[0].VerifiedOutput)

			second := writeModel(t, t.TempDir(), 2)
			get(t, c, second, with(real.provider))
			again := get(t, c, second, with(real.provider), verify)
			require.Equal(t, "hit", again.Outcome)
			require.Empty(t, again.Warnings, "it was compared")
		})
	}
}
