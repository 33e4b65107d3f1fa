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
	return unixsock.UserState()
}

func defaultSocket() string {
	if os.Geteuid() == 0 {
		return unixsock.SystemSocket
	}
	return unixsock.UserSocket()
}

// UserFile is where a user has the configuration of the daemon that clients start; "" without a home.
func UserFile() string {
	dir, err := os.UserConfigDir()
	if err != nil || !filepath.IsAbs(dir) {
		return ""
	}
	return filepath.Join(dir, "epcached", "epcached.toml")
}
