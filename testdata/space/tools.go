package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

func command(env []string, dir, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, args[0], err, out)
	}
	return nil
}

// listed returns the corpus's directories, which is what the tools are given: corpus.json is none
// of it.
func listed(c corpus) (names []string) {
	for _, a := range c.Artefacts {
		names = append(names, a.Name)
	}
	return names
}

// whole files: cp, and one sync for each.

func wholeIn(c corpus, store string) ([]int64, error) {
	for _, a := range c.Artefacts {
		if err := command(nil, c.dir, "cp", "-r", "--reflink=never", a.Name, store); err != nil {
			return nil, err
		}
		for _, f := range a.Files {
			if err := syncFile(filepath.Join(store, f.Path)); err != nil {
				return nil, err
			}
		}
	}
	return sizeOf(store)
}

func wholeOut(c corpus, store, into string) error {
	for _, a := range c.Artefacts {
		if err := command(nil, store, "cp", "-r", "--reflink=never", a.Name, into); err != nil {
			return err
		}
	}
	return nil
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

func restic(compression string) method {
	env := func(store string) []string {
		return []string{"RESTIC_PASSWORD=x", "RESTIC_REPOSITORY=" + filepath.Join(store,
			"repository"), "RESTIC_CACHE_DIR=" + filepath.Join(filepath.Dir(store), "cache")}
	}
	return method{
		takeIn: func(c corpus, store string) ([]int64, error) {
			if err := command(env(store), c.dir, "restic", "init", "--repository-version",
				"2"); err != nil {
				return nil, err
			}
			args := append([]string{"backup", "--quiet", "--compression", compression},
				listed(c)...)
			if err := command(env(store), c.dir, "restic", args...); err != nil {
				return nil, err
			}
			return sizeOf(store)
		},
		restore: func(c corpus, store, into string) error {
			return command(env(store), c.dir, "restic", "restore", "latest", "--quiet",
				"--target", into)
		},
	}
}

func borg(params ...string) method {
	env := func(store string) []string {
		home := filepath.Join(filepath.Dir(store), "borg")
		return []string{"BORG_BASE_DIR=" + home, "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK=yes",
			"BORG_REPO=" + filepath.Join(store, "repository")}
	}
	return method{
		takeIn: func(c corpus, store string) ([]int64, error) {
			if err := command(env(store), c.dir, "borg", "init", "--encryption",
				"none"); err != nil {
				return nil, err
			}
			args := append(append([]string{"create", "--compression", "none"}, params...),
				"::corpus")
			if err := command(env(store), c.dir, "borg",
				append(args, listed(c)...)...); err != nil {
				return nil, err
			}
			return sizeOf(store)
		},
		restore: func(c corpus, store, into string) error {
			return command(env(store), into, "borg", "extract", "::corpus")
		},
	}
}

// casync always compresses its chunks; one index for each artefact.

func casyncIn(c corpus, store string) ([]int64, error) {
	for _, a := range c.Artefacts {
		args := []string{"make", "--store=" + filepath.Join(store, "chunks.castr"), "--without=all",
			filepath.Join(store, a.Name+".caidx"), a.Name}
		if err := command(nil, c.dir, "casync", args...); err != nil {
			return nil, err
		}
	}
	return sizeOf(store)
}

func casyncOut(c corpus, store, into string) error {
	for _, a := range c.Artefacts {
		args := []string{"extract", "--store=" + filepath.Join(store, "chunks.castr"),
			filepath.Join(store, a.Name+".caidx"), filepath.Join(into, a.Name)}
		if err := command(nil, store, "casync", args...); err != nil {
			return err
		}
	}
	return nil
}
