package filestamp

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// However long a model is hashed, its files' age is that of when the reading began.
func TestWitnessIsAsOldAsItsBeginning(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model")
	require.NoError(t, os.WriteFile(path, []byte("model"), 0o600))
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	info, err := f.Stat()
	require.NoError(t, err)
	cases := map[string]struct {
		began time.Duration // after the file was written
		old   bool
	}{
		"at once":           {0, false},
		"a second later":    {time.Second, false},
		"three seconds":     {3 * time.Second, true},
		"before, by clock":  {-time.Hour, false},
		"a long time later": {time.Hour, true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			w, err := Watch([]*os.File{f}, info.ModTime().Add(c.began), true)
			require.NoError(t, err)
			require.Equal(t, c.old, w.Reliable())
			require.NoError(t, w.Unchanged())
		})
	}
}

// A file is written back only where its stamp may be believed: a store through a mapping moves no
// time before that, and writing back can take as long as reading.
func TestOnlyBelievedFilesAreWrittenBack(t *testing.T) {
	for name, c := range map[string]struct {
		began    time.Duration // after the file was written
		believed bool
	}{
		"just written": {0, false},
		"left alone":   {time.Hour, true},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := os.Create(filepath.Join(t.TempDir(), "model"))
			require.NoError(t, err)
			defer f.Close()
			if _, ok := FileSystem(int(f.Fd())); !ok {
				t.Skip("SKIPPED: the temporary directory is on a file system whose times are not " +
					"believed")
			}
			require.NoError(t, f.Truncate(int64(os.Getpagesize())))
			mapped, err := unix.Mmap(int(f.Fd()), 0, os.Getpagesize(),
				unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			require.NoError(t, err)
			defer func() { require.NoError(t, unix.Munmap(mapped)) }()
			mapped[0]++ // the page is dirty from here on
			info, err := f.Stat()
			require.NoError(t, err)
			w, err := Watch([]*os.File{f}, info.ModTime().Add(c.began), true)
			require.NoError(t, err)
			require.Equal(t, c.believed, w.Reliable())
			for range 100 { // a tick of the file system's clock has passed by then
				mapped[0]++
				if err = w.Unchanged(); err != nil {
					break
				}
				time.Sleep(time.Millisecond)
			}
			require.Equal(t, c.believed, err != nil)
		})
	}
}
