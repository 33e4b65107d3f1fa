package config

import (
	"errors"
	"fmt"
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/epcached/epcached/internal/bytesize"
)

// checks are those of texts, by their names in the tags of fields.
var checks = map[string]func(string) error{
	"age": checkUnused, "budget": checkBudget, "duration": checkDuration, "ep": checkEP,
	"file": checkFile, "floor": checkFloor,
	"option": matches(`(?s)^[^/]+/.`, "%q is not EP/option or session/key"),
	"path":   notEmpty, "pause": checkPause, "some": notEmpty,
	// "name" or "uid", with ":group" or without. The daemon's start checks that the user exists.
	"user": matches(`^$|^[A-Za-z0-9_][A-Za-z0-9_.-]*\$?(:[A-Za-z0-9_][A-Za-z0-9_.-]*\$?)?$`,
		"%q is not a user, such as epcached-worker, 990 or 990:990"),
	"window": checkWindow,
}

var dayDuration = regexp.MustCompile(`^(\d+(?:\.\d+)?)d`)

// ParseDuration reads Go's durations, "1h30m", and days before them: "90d", "1d12h". It is not
// negative.
func ParseDuration(text string) (time.Duration, error) {
	rest, days, err := text, 0.0, error(nil)
	if m := dayDuration.FindStringSubmatch(text); m != nil {
		rest = text[len(m[0]):]
		days, err = strconv.ParseFloat(m[1], 64)
	}
	var d time.Duration
	if err == nil && (rest != "" || text == "") {
		d, err = time.ParseDuration(rest)
	}
	if err != nil {
		return 0, fmt.Errorf("%q is not a duration, such as 90d or 12h", text)
	}
	total := days*24*float64(time.Hour) + float64(d)
	if d < 0 || total > math.MaxInt64/2 {
		return 0, fmt.Errorf("%q is negative or more than 100 years", text)
	}
	return time.Duration(total), nil
}

// Duration is ParseDuration of a checked text; 0 for "".
func Duration(text string) time.Duration {
	d, _ := ParseDuration(text)
	return d
}

func checkDuration(text string) error {
	if text == "" {
		return nil
	}
	_, err := ParseDuration(text)
	return err
}

// checkPause validates a pause between retries. It must not be 0, because then every request would
// retry.
func checkPause(text string) error {
	d, err := ParseDuration(text)
	if err == nil && (d < time.Second || d > 365*24*time.Hour) {
		return fmt.Errorf("%q is not 1s to 365d", text)
	}
	return err
}

func checkWindow(text string) error {
	if text == "" {
		return nil
	}
	from, to, _ := strings.Cut(text, "-")
	var times [2]time.Time
	for i, part := range []string{from, to} {
		at, err := time.Parse("15:04", part)
		if err != nil || len(part) != len("15:04") {
			return fmt.Errorf("%q is not a time span, such as 22:00-06:00", text)
		}
		times[i] = at
	}
	if times[0].Equal(times[1]) {
		return fmt.Errorf("%q has no length; omit it for the whole day", text)
	}
	return nil
}

func notEmpty(text string) error {
	if text == "" {
		return errors.New("it is empty")
	}
	return nil
}

// checkFile refuses what is no regular file, because a FIFO would block. The file may be missing.
func checkFile(path string) error {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("%q is not a regular file", path)
	}
	return notEmpty(path)
}

// matches returns the check that a text matches a pattern.
func matches(pattern, wrong string) func(string) error {
	form := regexp.MustCompile(pattern)
	return func(text string) error {
		if !form.MatchString(text) {
			return fmt.Errorf(wrong, text)
		}
		return nil
	}
}

// Amount is a number of bytes, or a part of a file system's size. The zero Amount is no bound.
type Amount struct {
	Bytes   int64
	Percent float64 // above 0 and up to 100: then Bytes is 0
}

// ParseAmount reads "20GiB", "500MiB", "1073741824" or "15%". "" is no bound.
func ParseAmount(text string) (Amount, error) {
	if text == "" {
		return Amount{}, nil
	}
	digits, isPart := strings.CutSuffix(text, "%")
	part, err := strconv.ParseFloat(digits, 64)
	n, ok := bytesize.Parse(text)
	switch {
	case isPart && err == nil && part > 0 && part <= 100:
		return Amount{Percent: part}, nil
	case isPart || !ok:
		return Amount{}, fmt.Errorf("%q is not an amount, such as 20GiB, 500MiB, 1073741824 or "+
			"15%%; \"\" means no limit", text)
	case n < 1:
		return Amount{}, fmt.Errorf("%q would keep no builds; \"\" means no limit", text)
	}
	return Amount{Bytes: n}, nil
}

// amount is ParseAmount of a checked text.
func amount(text string) Amount {
	a, _ := ParseAmount(text)
	return a
}

// Amounts parses Budget, FreeFloor and UserShare.
func (x Space) Amounts() (budget, floor, share Amount) {
	return amount(x.Budget), amount(x.FreeFloor), amount(x.UserShare)
}

// minBudget is smaller than any useful compiled model. A smaller budget probably lacks its unit.
const minBudget = 64 << 10

func checkBudget(text string) error {
	a, err := ParseAmount(text)
	if err == nil && a.Bytes > 0 && a.Bytes < minBudget {
		return fmt.Errorf(
			"%q is less than 64KiB, and would keep nothing: write the unit, such as \"1GiB\"", text)
	}
	return err
}

func checkFloor(text string) error {
	a, err := ParseAmount(text)
	if err == nil && a.Percent == 100 {
		return fmt.Errorf("%q would keep no builds: the file system is never empty", text)
	}
	return err
}

// checkUnused validates an age. It must not be shorter than the grace for paths, within which views
// are kept anyway.
func checkUnused(text string) error {
	if text == "" {
		return nil
	}
	d, err := ParseDuration(text)
	if err == nil && d < time.Hour {
		return fmt.Errorf("%q is less than 1h", text)
	}
	return err
}
