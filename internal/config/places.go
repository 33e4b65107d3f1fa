package config

import (
	"os"
	"path/filepath"

	"github.com/epcached/epcached/unixsock"
)

// defaultPlaces returns the state and the socket, "" for a user without a home.
func defaultPlaces() (state, socket string) {
	if os.Geteuid() == 0 {
		return "/var/lib/epcached", unixsock.SystemSocket
	}
	return unixsock.UserState(), unixsock.UserSocket()
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
	// In place of the defaults, which for root are those of the system's daemon.
	state, socket := defaultPlaces()
	if s.State == state {
		s.State = unixsock.UserState()
	}
	if s.Socket == socket {
		s.Socket = unixsock.UserSocket()
	}
	return s, nil
}
