package rules

import (
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func compareTexts(a, b string) (order int, ok bool) {
	v, ok1 := parseVersion(a)
	w, ok2 := parseVersion(b)
	return v.compare(w, maxParts), ok1 && ok2
}

func TestCompareVersions(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{
		{"2026.4.1", "2026.4.1", 0},
		{"2026.4.1", "2026.10.0", -1},
		{"1.8.1+95d534b.ci.79", "1.8.1", 0},
		{"1.8.1+a", "1.8.1+b", 0},
		{"2.51.0.250905", "2.51.0", 1},
		{"v2.49.40.260810104044", "2.51.0.260929181845", -1},
		{"V1", "v1.0.0", 0},
		{"1.8", "1.8.0", 0},
		{"1.8", "1.8.1", -1},
		{"535.104.05", "535.104.5", 0},
		{"9", "10", -1},
		// longer than any integer
		{"1.99999999999999999999999999", "1.100000000000000000000000000", -1},
	} {
		got, ok := compareTexts(c.a, c.b)
		require.True(t, ok, "%s, %s", c.a, c.b)
		require.Equal(t, c.want, got, "%s, %s", c.a, c.b)
	}
}

func TestNoVersionsAreNotComparable(t *testing.T) {
	for _, text := range []string{"", "v", "latest", "1.8.1-rc1", "1.8.x", "1..2", ".1", "1.",
		"1,2", " 1.2", "-1", "+1", "١.٢", "vv1", strings.Repeat("1.", 40) + "1"} {
		_, ok := compareTexts(text, "1.2")
		require.False(t, ok, text)
		_, ok = compareTexts("1.2", text)
		require.False(t, ok, text)
	}
}

// drawVersion draws versions that are close to each other, so that equal ones turn up, and spells
// them in some way.
func drawVersion(t *rapid.T, label string) (text string, numbers []int) {
	numbers = rapid.SliceOfN(rapid.SampledFrom([]int{0, 0, 1, 2, 9, 10, 2026}), 1, 5).Draw(t, label)
	var parts []string
	for _, n := range numbers {
		parts = append(parts, strings.Repeat("0", rapid.IntRange(0, 2).Draw(t, "leading zeros"))+
			strconv.Itoa(n))
	}
	return rapid.SampledFrom([]string{"", "v", "V"}).
		Draw(t, "prefix") + strings.Join(parts, ".") +
		rapid.SampledFrom([]string{"", "+abc", "+1.2"}).Draw(t, "build"), numbers
}

// The model: numbers, compared one by one, with zeros behind.
func compareNumbers(a, b []int) int {
	for i := range max(len(a), len(b)) {
		x, y := 0, 0
		if i < len(a) {
			x = a[i]
		}
		if i < len(b) {
			y = b[i]
		}
		if x != y {
			if x < y {
				return -1
			}
			return 1
		}
	}
	return 0
}

func TestVersionsAreTotallyOrdered(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, x := drawVersion(t, "a")
		b, y := drawVersion(t, "b")
		c, _ := drawVersion(t, "c")
		compare := func(a, b string) int {
			order, ok := compareTexts(a, b)
			require.True(t, ok)
			return order
		}
		require.Equal(t, compareNumbers(x, y), compare(a, b))
		require.Zero(t, compare(a, a))
		require.Equal(t, -compare(a, b), compare(b, a))
		if compare(a, b) <= 0 && compare(b, c) <= 0 {
			require.LessOrEqual(t, compare(a, c), 0)
		}
		if compare(a, b) == 0 {
			require.Equal(t, compare(a, c), compare(b, c))
		}
	})
}

// A text that cannot be compared with one version cannot be compared with any.
func TestComparableIsAPropertyOfOneVersion(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringMatching(`[v]?[0-9a.+ -]{0,8}`).Draw(t, "text")
		other, _ := drawVersion(t, "other")
		_, alone := compareTexts(text, text)
		_, left := compareTexts(text, other)
		_, right := compareTexts(other, text)
		require.Equal(t, alone, left)
		require.Equal(t, alone, right)
	})
}
