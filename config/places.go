package config

import (
	"os"
	"path/filepath"

	"github.com/epcached/epcached/unixsock"
)

// defaultState is "" for a user without a home.
func defaultState() string {
	if os.Geteuid() == 0 {
		return "/var/lib/epcached"
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "epcached")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	return filepath.Join(home, ".local", "state", "epcached")
}

func defaultSocket() string {
	if os.Geteuid() == 0 {
		return unixsock.SystemSocket
	}
	return unixsock.UserSocket()
}
