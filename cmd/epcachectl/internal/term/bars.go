package term

import (
	"fmt"
	"strings"
	"time"

	"github.com/epcached/epcached/unixsock/wire"
)

// barCells is how many characters a bar has.
const barCells = 20

// bar tells in a line how far one model is, age after it was last reported: a bar where there is something to measure
// by, which is bytes, builds or files, or how long such compiles took before. Without a name it is of the call itself.
func bar(name string, p *wire.Progress, age time.Duration) string {
	text := Printable(p.GetPhase())
	if name != "" {
		text = fmt.Sprintf("%-9s  %s", text, Printable(name))
	}
	if part, known := portion(p, age); known {
		full := int(part * barCells)
		text += "  [" + strings.Repeat("#", full) + strings.Repeat(".", barCells-full) + "]"
	}
	text += "  " + tookOf(p, age)
	if more := detail(p); more != "" {
		text += " " + more
	}
	return text
}

// portion is how much is done. An estimate never fills the bar: only the end does.
func portion(p *wire.Progress, age time.Duration) (float64, bool) {
	switch {
	case p.GetTotalBytes() > 0:
		return min(max(float64(p.GetDoneBytes())/float64(p.GetTotalBytes()), 0), 1), true
	case p.GetTotal() > 0:
		return min(float64(p.GetDone())/float64(p.GetTotal()), 1), true
	case p.GetEstimateMs() > 0:
		return min(float64(elapsed(p, age))/float64(estimated(p)), 0.95), true
	}
	return 0, false
}

func elapsed(p *wire.Progress, age time.Duration) time.Duration {
	return max(0, Milliseconds(p.GetElapsedMs())+age)
}

func estimated(p *wire.Progress) time.Duration { return Milliseconds(p.GetEstimateMs()) }

// Milliseconds is a number of them as a duration.
func Milliseconds(ms int64) time.Duration { return time.Duration(ms) * time.Millisecond }

func tookOf(p *wire.Progress, age time.Duration) string {
	took, usual := elapsed(p, age), estimated(p)
	switch {
	case usual <= 0:
		return Whole(took)
	case took > usual:
		return Whole(took) + ", usually " + Whole(usual)
	}
	return Whole(took) + " of about " + Whole(usual)
}

// Whole spells a time for somebody who watches it pass.
func Whole(d time.Duration) string {
	return (d + time.Second/2).Truncate(time.Second).String()
}
