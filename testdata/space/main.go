// Command space measures how much space context binaries of real compilers take,
// and how fast they come and go, with epcached, its store as a whole and its
// package dedupe by itself, and with its peers: whole files, restic, borg,
// casync, and chunk stores with FastCDC and with gear chunks as Xet cuts them. All
// take the same files in the same order. The any-offset bound of doc/concepts.md
// is the yardstick. With --week it also simulates a week of use: see week.go.
//
// It is a module of its own, so that what only this comparison needs is no
// requirement of epcached. Run it by `make bench-space`.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/pprof"
	"strings"
	"text/tabwriter"

	"github.com/epcached/epcached/cache"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "space:", err)
		os.Exit(1)
	}
}

func run() error {
	corpusDir := flag.String("corpus", "", "directory that space_corpus.py made")
	work := flag.String("work", "",
		"empty directory for what is stored; on the file system to be measured")
	peers := flag.String("peers", "",
		"directory that fetch-peers made; without it restic, "+
			"borg and casync are looked for in PATH")
	only := flag.String("only", "",
		"methods, with commas between; all if empty, and none of them if it is \"none\"")
	noRestore := flag.Bool("take-in", false, "only take in, and restore nothing: for profiles")
	week := flag.Bool("week", false, "simulate a week as well")
	third := flag.Int("third", 0,
		"of the artefacts, 1 to 3, that is used daily in that week; 0: a week for each")
	packAfter := flag.Duration("pack-after", 0, "in that week, in the place of the store's default")
	knownBound := flag.Int64("bound", 0,
		"bytes of the any-offset bound, from an earlier run, where it is not measured in this one")
	one := flag.String("one", "",
		"run one method in this process and print its figures as JSON (internal)")
	flag.Parse()
	if *corpusDir == "" || *work == "" {
		return fmt.Errorf("--corpus and --work are needed: see make bench-space")
	}
	for _, dir := range []*string{corpusDir, work, peers} {
		if *dir == "" {
			continue
		}
		// the programs that are compared run in directories of their own
		absolute, err := filepath.Abs(*dir)
		if err != nil {
			return err
		}
		*dir = absolute
	}
	c, err := readCorpus(*corpusDir)
	if err != nil {
		return err
	}
	if *peers != "" {
		if err := os.Setenv("PATH",
			filepath.Join(*peers, "bin")+":"+os.Getenv("PATH")); err != nil {
			return err
		}
	}
	if *one != "" {
		if path := os.Getenv("SPACE_PROFILE"); path != "" {
			f, err := os.Create(path)
			if err != nil {
				return err
			}
			defer f.Close()
			if err := pprof.StartCPUProfile(f); err != nil {
				return err
			}
			defer pprof.StopCPUProfile()
		}
		return printOne(c, *one, *work, *noRestore)
	}
	bound, err := compare(c, *corpusDir, *work, *only, *noRestore, *knownBound)
	if err != nil || !*week {
		return err
	}
	if bound == 0 {
		return fmt.Errorf("the week needs the bound: measure it, or state it with --bound")
	}
	return runWeeks(c, *work, bound, *third, cache.Options{PackAfter: *packAfter})
}

// printOne is the child's part: a process for each method, so that its peak memory is its own.
func printOne(c corpus, name, work string, noRestore bool) error {
	m, known := methods()[name]
	if !known {
		return fmt.Errorf("no method %q", name)
	}
	if noRestore {
		m.restore = nil
	}
	f, err := m.measure(c, work)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return json.NewEncoder(os.Stdout).Encode(f)
}

func compare(c corpus, corpusDir, work, only string, noRestore bool, bound int64) (int64, error) {
	wanted := order
	if only != "" {
		wanted = strings.Split(only, ",")
	}
	if only == "none" {
		return bound, nil
	}
	self, err := os.Executable()
	if err != nil {
		return bound, err
	}
	fmt.Printf("corpus: %d artefacts, %d files, %.1f MB\n", len(c.Artefacts), len(c.files()),
		float64(c.size())/1e6)
	fmt.Printf(columns, "method", "stored MB", "logical/stored", "x bound", "take in GB/s", "CPU s",
		"restore GB/s", "peak MiB")
	failed := 0
	all := map[string]figures{}
	each := map[string][]int64{}
	for _, name := range wanted {
		f, err := inChild(self, corpusDir, work, name, noRestore)
		if err != nil {
			fmt.Fprintf(os.Stderr, "space: %s: %v\n", name, err)
			failed++
			continue
		}
		all[name] = f
		if f.Each != nil {
			each[name] = f.Each
		}
		if name == "bound" {
			bound = f.Stored
		}
		f.print(name, c.size(), bound)
	}
	printAgainst(os.Stdout, all)
	if each["bound"] != nil && each["epcached"] != nil {
		printEach(c, each["bound"], each["epcached"])
	}
	if failed > 0 {
		return bound, fmt.Errorf("%d methods failed", failed)
	}
	return bound, nil
}

func inChild(self, corpusDir, work, name string, noRestore bool) (figures, error) {
	dir, err := os.MkdirTemp(work, name+"-")
	if err != nil {
		return figures{}, err
	}
	defer os.RemoveAll(dir)
	cmd := exec.Command(self, "--corpus", corpusDir, "--work", dir, "--one", name,
		fmt.Sprintf("--take-in=%v", noRestore))
	cmd.Stderr = os.Stderr
	b, err := cmd.Output()
	if err != nil {
		return figures{}, err
	}
	var f figures
	return f, json.Unmarshal(b, &f)
}

// printEach tells where the bytes of the sum are.
func printEach(c corpus, bound, stored []int64) {
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "\nartefact\tMB\tbound MB\tepcached MB\tmore by KB\twhat varies")
	for i, a := range c.Artefacts {
		size := int64(0)
		for _, f := range a.Files {
			size += f.Size
		}
		fmt.Fprintf(out, "%s\t%.1f\t%.3f\t%.3f\t%.0f\t%s\n", a.Name, float64(size)/1e6,
			float64(bound[i])/1e6,
			float64(stored[i])/1e6, float64(stored[i]-bound[i])/1e3, a.Why)
	}
	out.Flush()
}
