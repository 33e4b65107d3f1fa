package config

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/epcached/epcached/internal/bytesize"
)

// Amount is a number of bytes, or a part of what a file system holds. The zero Amount is no bound.
type Amount struct {
	Bytes   int64
	Percent float64 // above 0 and up to 100: then Bytes is 0
}

// ParseAmount reads "20GiB", "500MiB", "1073741824" or "15%". Nothing at all is no bound.
func ParseAmount(text string) (Amount, error) {
	if text == "" {
		return Amount{}, nil
	}
	bad := fmt.Errorf("%q is no amount, such as 20GiB, 500MiB, 1073741824 or 15%%; \"\" is no bound", text)
	if digits, ok := strings.CutSuffix(text, "%"); ok {
		n, err := strconv.ParseFloat(digits, 64)
		if err != nil || !(n > 0 && n <= 100) {
			return Amount{}, bad
		}
		return Amount{Percent: n}, nil
	}
	n, ok := bytesize.Parse(text)
	if !ok {
		return Amount{}, bad
	}
	if n < 1 {
		return Amount{}, fmt.Errorf("%q would keep nothing; \"\" is no bound", text)
	}
	return Amount{Bytes: n}, nil
}

// amount is ParseAmount of what was checked when it was read.
func amount(text string) Amount {
	a, err := ParseAmount(text)
	if err != nil {
		return Amount{}
	}
	return a
}

// Amounts are Budget, FreeFloor and UserBytes, read.
func (x Space) Amounts() (budget, floor, user Amount) {
	return amount(x.Budget), amount(x.FreeFloor), amount(x.UserBytes)
}

// Unused is MaxUnused as a duration; 0: any time.
func (x Space) Unused() time.Duration { return duration(x.MaxUnused) }

// leastBudget is less than any compiled model that is worth keeping: who asks for less has left out the unit.
const leastBudget = 64 << 10

func checkBudget(text string) error {
	a, err := ParseAmount(text)
	if err == nil && a.Bytes > 0 && a.Bytes < leastBudget {
		return fmt.Errorf("%q is less than 64KiB, and would keep nothing: write the unit, such as \"1GiB\"", text)
	}
	return err
}

func checkFloor(text string) error {
	a, err := ParseAmount(text)
	if err == nil && a.Percent == 100 {
		return fmt.Errorf("%q would keep nothing: the file system is never empty", text)
	}
	return err
}

// checkUnused finds what is wrong with an age: what is younger than the grace that paths have could not go anyway.
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
