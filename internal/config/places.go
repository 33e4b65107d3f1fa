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

// LoadOwn loads the configuration of the daemon that clients start: a file, the user's own where none is named, with
// the user's own places. Where that user has none it returns the defaults, with File set all the same.
func LoadOwn(file string) (*Settings, error) {
	read := file
	if file == "" {
		file = UserFile()
		if _, err := os.Stat(file); err == nil {
			read = file
		}
	}
	s, err := Load(read)
	if err != nil {
		return nil, err
	}
	s.File = file
	s.ownPlaces()
	return s, nil
}

// ownPlaces puts the user's own places in place of the defaults, which for root are those of the system's daemon.
func (s *Settings) ownPlaces() {
	defaults := Defaults()
	if s.State == defaults.State {
		s.State = unixsock.UserState()
	}
	if s.Socket == defaults.Socket {
		s.Socket = unixsock.UserSocket()
	}
}
