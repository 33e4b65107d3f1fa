package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/config"
)

// workerUser gives the user that workers run as, nil for the daemon's own. It finds out now what would fail each compile later.
func workerUser(s *config.Settings, worker string) (*compilers.Credential, error) {
	if s.WorkerUser == "" {
		return nil, nil
	}
	wrong := func(err error) error {
		return usageError{fmt.Errorf("configuration: worker_user %q: %w", s.WorkerUser, err)}
	}
	c, err := compilers.LookUpUser(s.WorkerUser)
	if err != nil {
		return nil, wrong(err)
	}
	switch {
	case int(c.UID) == os.Geteuid():
		return nil, nil
	case os.Geteuid() != 0:
		return nil, wrong(errors.New("only a daemon that runs as root can start workers as another user"))
	case c.GID == 0:
		return nil, wrong(errors.New("root's group is no group for workers"))
	}
	paths := []string{filepath.Join(s.State, "staging"), worker}
	for _, rt := range s.Runtimes {
		paths = append(paths, rt.Directory, rt.ORTLibrary)
		for _, library := range rt.EPLibraries {
			paths = append(paths, library)
		}
	}
	for _, path := range paths {
		if err := c.CanPass(path); err != nil {
			return nil, wrong(err)
		}
	}
	if err := c.CanRun(worker); err != nil {
		return nil, wrong(err)
	}
	return c, nil
}
