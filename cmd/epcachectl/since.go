package main

import (
	"fmt"
	"time"

	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/internal/config"
)

// sinceForms are the ways to write a time, all of them local where they name no zone.
var sinceForms = []string{time.RFC3339Nano, "2006-01-02T15:04:05", "2006-01-02 15:04:05", "2006-01-02T15:04", "2006-01-02 15:04", "2006-01-02"}

// parseSince reads a duration before now, a time, a day, or a time of day: the last one that has been.
func parseSince(text string, now time.Time) (time.Time, error) {
	if d, err := config.ParseDuration(text); err == nil {
		return now.Add(-d), nil
	}
	for _, form := range sinceForms {
		if at, err := time.ParseInLocation(form, text, now.Location()); err == nil {
			return at, nil
		}
	}
	for _, form := range []string{"15:04", "15:04:05"} {
		at, err := time.Parse(form, text)
		if err != nil {
			continue
		}
		today := time.Date(now.Year(), now.Month(), now.Day(), at.Hour(), at.Minute(), at.Second(), 0, now.Location())
		if today.After(now) {
			return today.AddDate(0, 0, -1), nil
		}
		return today, nil
	}
	return time.Time{}, fmt.Errorf("--since %q is neither a duration, such as 2h or 3d, nor a time, such as 2026-11-21, 14:30 or 2026-11-21T14:30:00Z", term.Brief(text))
}
