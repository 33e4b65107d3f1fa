package remotes

import (
	"fmt"
	"time"

	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock/wire"
)

// Line returns one line about a remote.
func Line(r *wire.Remote) string {
	line := stateOf(r) + "; " + term.Count(r.GetFetched(), "build") + " fetched"
	if r.GetPublishes() {
		line += fmt.Sprintf(", %d published", r.GetPublished())
	}
	if text := r.GetTrustError(); text != "" {
		line += "; " + term.Printable(text)
	}
	return line
}

func stateOf(r *wire.Remote) string {
	switch wait := r.GetBreakerSeconds(); {
	case wait > 0:
		return "fails, and is not asked for " + term.Seconds(wait)
	case r.GetFailing():
		return "does not answer"
	case r.GetCalls() == 0:
		return "not called yet"
	}
	return "answers"
}

// Rows returns a table about a remote.
func Rows(r *wire.Remote) [][]string {
	rows := [][]string{
		{"remote", term.Printable(r.GetName()) + "  " + term.Printable(r.GetUrl())},
		{"state", stateOf(r)},
		{"look-ups", fmt.Sprintf("%s, %d missing, %d denied, %d unreachable, %d skipped",
			term.Count(r.GetCalls(), "call"),
			r.GetMissing(), r.GetDenied(), r.GetUnreachable(), r.GetSkipped())},
		{"fetched", fmt.Sprintf("%s, %s over the network, %s from builds here; %d refused; %s lost",
			term.Count(r.GetFetched(), "build"), term.Bytes(r.GetFetchedBytes()),
			term.Bytes(r.GetSeedBytes()),
			r.GetRefused()+r.GetDamaged(), term.Seconds(r.GetLostSeconds()))},
	}
	if r.GetPublishes() {
		rows = append(rows, []string{"published", fmt.Sprintf("%s, %s; %d queued, %d failed",
			term.Count(r.GetPublished(), "build"), term.Bytes(r.GetSentBytes()), r.GetQueued(),
			r.GetNotPublished())},
			[]string{"leases", fmt.Sprintf("%d compiled for all, %d waited", r.GetLeasesWon(),
				r.GetLeasesWaited())})
	}
	if n := r.GetTrustSequence(); n > 0 {
		rows = append(rows, []string{"trust", fmt.Sprintf("document %d, until %s", n,
			term.Time(r.GetTrustExpiresMs()))})
	}
	if text := r.GetTrustError(); text != "" {
		text = term.Printable(text)
		if r.GetTrustExpiresMs() <= time.Now().UnixMilli() { // otherwise the last one still counts
			text += "; sign a new one: epcachectl remote revoke " + term.Printable(r.GetName()) +
				" --key ROOT.key"
		}
		rows = append(rows, []string{"not trusted", text})
	}
	if text := r.GetPublishError(); text != "" {
		rows = append(rows, []string{"not published", term.Printable(text)})
	}
	if text := r.GetLastError(); text != "" {
		rows = append(rows, []string{"last error",
			term.Time(r.GetLastErrorMs()) + ", " + term.Printable(text)})
	}
	return rows
}
