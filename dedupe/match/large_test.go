package match

import (
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// made is a source of any size that stands nowhere: its bytes are made when they are read.
type made struct {
	size int64
	fill func(off int64, b []byte) // both are multiples of madeUnit, and b is no more than a MiB
}

const madeUnit = 16

var madeBuffers = sync.Pool{New: func() any { return new([1 << 20]byte) }}

func (m made) Size() int64 { return m.size }

func (m made) ReadAt(p []byte, off int64) (int, error) {
	b := madeBuffers.Get().(*[1 << 20]byte)
	defer madeBuffers.Put(b)
	for n := 0; n < len(p); {
		at := off + int64(n)
		from := at &^ (madeUnit - 1)
		end := min((off+int64(len(p))+madeUnit-1)&^(madeUnit-1), from+int64(len(b)))
		m.fill(from, b[:end-from])
		n += copy(p[n:], b[at-from:end-from])
	}
	return len(p), nil
}

// Ten gigabytes of whatever it may be take linear time and bounded memory. EPCACHED_LARGE=1 runs
// it; `make bench-space` does.
func TestTenGigabytes(t *testing.T) {
	if os.Getenv("EPCACHED_LARGE") == "" {
		t.Skip("takes minutes: set EPCACHED_LARGE=1")
	}
	tensor := randomBytes(91, 1<<20)
	at, _ := nextAnchor(tensor, 0, minProduct(0))
	word, window := binary.LittleEndian.Uint64(tensor[at:]), tensor[at:at+128]
	period := bytes.Repeat([]byte("twelve bytes"), 1<<17)
	allDifferent := func(off int64, b []byte) {
		for k := 0; k < len(b); k += 8 {
			binary.LittleEndian.PutUint64(b[k:], different(tensor, off+int64(k)))
		}
	}
	for name, fill := range map[string]func(off int64, b []byte){
		"zeros": func(_ int64, b []byte) { clear(b) },
		"one tensor": func(off int64,
			b []byte) {
			copy(b[copy(b, tensor[off%(1<<20):]):], tensor)
		},
		"a period of 12": func(off int64, b []byte) { copy(b, period[off%12:]) },
		"all different":  allDifferent,
		"nearly another": func(off int64, b []byte) {
			allDifferent(off, b)
			for k := 0; k < len(b); k += 16 {
				if (off+int64(k))%(96<<10) == 0 {
					b[k] ^= 1
				}
			}
		},
		"anchors everywhere": func(off int64, b []byte) {
			for k := 0; k < len(b); k += 16 {
				binary.LittleEndian.PutUint64(b[k:], word)
				binary.LittleEndian.PutUint64(b[k+8:], different(tensor, off+int64(k)))
			}
		},
		"windows everywhere": func(off int64, b []byte) {
			for k := 0; k < len(b); k += 16 {
				if at := (off + int64(k)) % 144; at < 128 {
					copy(b[k:], window[at:at+16])
					continue
				}
				binary.LittleEndian.PutUint64(b[k:], different(tensor, off+int64(k)))
				binary.LittleEndian.PutUint64(b[k+8:], different(tensor, off+int64(k)+8))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			took := func(size int64) float64 {
				start := time.Now()
				var candidates []Candidate
				if name == "nearly another" {
					candidates = []Candidate{{Digest: cas.Digest{1},
						Source: made{size, allDifferent}}}
				}
				p, err := Find(context.Background(), made{size, fill}, among(candidates...))
				require.NoError(t, err)
				t.Logf("%d MB: %d literals, %d extents, %.1f s", size>>20, p.LiteralSize(),
					len(p.Extents), time.Since(start).Seconds())
				return time.Since(start).Seconds()
			}
			small := took(1 << 30)
			large := took(10 << 30)
			require.Less(t, large, 20*small+5, "ten times as much")
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			t.Logf("memory from the system so far: %d MB; at most in the process: %s", m.Sys>>20,
				peakMemory())
			require.Less(t, m.Sys, uint64(150<<20))
		})
	}
}

// different are bytes that come nowhere else.
func different(tensor []byte, off int64) uint64 {
	return binary.LittleEndian.Uint64(tensor[off&(1<<20-8):]) ^ uint64(off>>20*0x5851F42D4C957F2D)
}

// peakMemory is what Linux says of it.
func peakMemory() string {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return "unknown"
	}
	_, rest, _ := strings.Cut(string(b), "VmHWM:")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(line)
}
