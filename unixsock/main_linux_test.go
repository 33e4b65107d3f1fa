package unixsock

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

// patience bounds every wait of these tests for what must come: far more than anything takes on a
// busy machine, and no hang.
const patience = time.Minute

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
