package logs

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLinesOfOneUserAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := New(&out, slog.LevelInfo)
		count := func(part string) int { return strings.Count(out.String(), part) }
		for range 100 {
			log.Info("answer", "uid", uint32(1), "error", "broken pipe")
			log.Debug("answer", "uid", uint32(1), "error", "broken pipe")
			log.Info("ready", "socket", "s")
		}
		log.Info("answer", "uid", uint32(2), "error", "broken pipe")
		log.Warn("connection refused", "uid", uint32(1))
		require.Equal(t, mostLines, count("msg=answer uid=1"))
		require.Equal(t, 100, count("msg=ready"), "lines that no user causes are all written")
		require.Equal(t, 1, count("msg=answer uid=2"), "each user has a limit of its own")
		require.Equal(t, 1, count(`msg="connection refused"`), "and so has each kind")
		time.Sleep(perTime + time.Second)
		synctest.Wait()
		require.Equal(t, 1, count(`msg="lines left out" uid=1 lines=80 message=answer`))
		require.Equal(t, 1, count("left out"))
		log.Info("answer", "uid", uint32(1))
		require.Equal(t, mostLines+1, count("msg=answer uid=1"), "the time has passed")
	})
}
