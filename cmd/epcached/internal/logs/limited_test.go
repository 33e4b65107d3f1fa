package logs

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// lines may be written by a timer while the test reads them.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) count(part string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), part)
}

func TestLinesOfOneUserAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out lines
		log := New(&out, slog.LevelInfo)
		count := out.count
		for range 100 {
			log.Info("answer", "uid", uint32(1), "error", "broken pipe")
			log.Debug("answer", "uid", uint32(1), "error", "broken pipe")
			log.Info("ready", "socket", "s")
		}
		log.Info("answer", "uid", uint32(2), "error", "broken pipe")
		log.Warn("connection refused", "uid", uint32(1))
		require.Equal(t, maxLines, count("msg=answer uid=1"))
		require.Equal(t, 100, count("msg=ready"), "lines that no user causes are all written")
		require.Equal(t, 1, count("msg=answer uid=2"), "each user has a limit of its own")
		require.Equal(t, 1, count(`msg="connection refused"`), "and so has each kind")
		time.Sleep(limitInterval + time.Second)
		synctest.Wait()
		require.Equal(t, 1, count(`msg="log lines dropped" uid=1 lines=80 message=answer`))
		require.Equal(t, 1, count("dropped"))
		log.Info("answer", "uid", uint32(1))
		require.Equal(t, maxLines+1, count("msg=answer uid=1"), "the time has passed")
	})
}
